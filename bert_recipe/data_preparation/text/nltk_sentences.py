"""nltk's training of Punkt's parameters. A file of its own, as its import takes a second."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import regex
from nltk.tokenize.punkt import PunktLanguageVars, PunktTrainer

from bert_recipe.data_preparation.text.sentences import (
    CLOSERS,
    OPENERS,
    PunktParameters,
    last_word,
    word_type,
)
from bert_recipe.utils.words import SENTENCE_ENDS

# With combining marks, which are the vowels of Hindi and others.
ABBREVIATION = regex.compile(r"\p{L}(?:[\p{L}\p{M}]|[.&'-])*")
ONE_LETTER = regex.compile(r"\X")
FULL_STOP = regex.compile(rf"(\S+)\.[{CLOSERS}]*(?:\s|$)")
# Of the paragraphs, from which on the full stop ends sentences in this language.
MIN_FULL_STOPS = 0.2
MIN_EXPECTED = 10  # ends of paragraphs, from which on their lack shows an abbreviation


class LanguageVars(PunktLanguageVars):
    """Punkt's character classes, with the same typographic marks in every nltk and the full stops
    of more scripts.
    """

    sent_end_chars = tuple(SENTENCE_ENDS)
    _re_word_start = rf"[^{OPENERS}{CLOSERS}`:;&#*@\-,]"
    _re_non_word_chars = rf"(?:[;*:@({{\[{CLOSERS}{re.escape(SENTENCE_ENDS.replace('.', ''))}])"


def train_punkt(paragraphs: Iterable[str]) -> PunktParameters:
    """Trains Punkt's parameters with nltk. Ten million characters take half a minute and 1 GB of
    memory.
    """
    texts = [" ".join(paragraph.split()) for paragraph in paragraphs]
    trainer = PunktTrainer(lang_vars=LanguageVars())
    # With nltk's penalty a few "Mr" without a full stop would outweigh thousands with one.
    trainer.IGNORE_ABBREV_PENALTY = True
    trainer.train("\n\n".join(texts))
    # The trainer also accepts words seen once before a comma or similar, most of them noise: count
    # again without them.
    trainer.find_abbrev_types()
    params = trainer.get_params()
    params.abbrev_types = {word for word in params.abbrev_types if ABBREVIATION.fullmatch(word)}
    params.abbrev_types -= ends_of_sentences(params.abbrev_types, texts)
    trainer.freq_threshold(ortho_thresh=3)
    return params


def ends_of_sentences(candidates: Iterable[str], texts: Sequence[str]) -> set[str]:
    """The candidates for abbreviations that are words at the ends of sentences, such as the verbs
    of Korean, which hardly occur without a full stop. In scripts with capital letters, the next
    word tells them apart; in others, an abbreviation has several letters and a full stop between
    them, one letter, or ends clearly fewer paragraphs than other words with a full stop.
    """
    doubtful = {word for word in candidates if word.lower() == word.upper()}
    doubtful = {word for word in doubtful if "." not in word and not ONE_LETTER.fullmatch(word)}
    if not doubtful:
        return set()
    counts: Counter[str] = Counter()  # of words with a full stop
    at_ends: Counter[str] = Counter()  # of these, at the ends of paragraphs
    for text in texts:
        for match in FULL_STOP.finditer(text):
            word = word_type(last_word(match[1]))
            counts[word] += 1
            at_ends[word] += match.end() == len(text)
    if at_ends.total() < MIN_FULL_STOPS * len(texts):
        return set()
    share = at_ends.total() / counts.total()
    return {
        word
        for word in doubtful
        if share * counts[word] < MIN_EXPECTED or at_ends[word] > share * counts[word] / 4
    }
