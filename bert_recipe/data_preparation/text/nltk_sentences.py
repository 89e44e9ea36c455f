"""nltk's Punkt: splitting with it, and training its parameters. A file of its own, as its import
takes a second.
"""

import re
from collections.abc import Iterable
from itertools import chain

from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, PunktTrainer

from bert_recipe.data_preparation.text.sentences import (
    CLOSERS,
    ENDS,
    OPENERS,
    PunktParameters,
    pieces,
)

# “What?” said he: the sentence continues.
CONTINUES = re.compile(rf"[^\W\d_]*[?!\u2026][{CLOSERS}]+$")
ABBREVIATION = re.compile(r"[^\W\d_](?:[^\W\d_]|[.&'-])*")
END_OF_NEXT_WORD = re.compile(rf"(\s\S*[{re.escape(ENDS)}])[{CLOSERS}]+$")


class Punkt(PunktSentenceTokenizer):
    """nltk's tokenizer, except that in `Mr. Brown.”` the sentence end after Brown does not count as
    one after Mr.
    """

    def text_contains_sentbreak(self, text: str) -> bool:
        return super().text_contains_sentbreak(END_OF_NEXT_WORD.sub(r"\1", text))


class PunktSplitter:
    """nltk's Punkt, except that a sentence continues after a quoted ? or ! if the next word is in
    lower case.
    """

    def __init__(self, params: PunktParameters):
        self.punkt = Punkt(params, lang_vars=LanguageVars())

    def split(self, paragraph: str) -> list[str]:
        sentences: list[str] = []
        for sentence in chain.from_iterable(map(self.punkt.tokenize, pieces(paragraph))):
            if sentence[0].islower() and sentences and CONTINUES.search(sentences[-1][-40:]):
                sentences[-1] += " " + sentence
            else:
                sentences.append(sentence)
        return sentences


class LanguageVars(PunktLanguageVars):
    """Punkt's character classes, with the same typographic marks in every nltk and the full stops
    of more scripts.
    """

    sent_end_chars = tuple(ENDS)
    re_boundary_realignment = re.compile(rf"[{CLOSERS}]+?(?:\s+|(?=--)|$)")
    _re_word_start = rf"[^{OPENERS}{CLOSERS}`:;&#*@\-,]"
    _re_non_word_chars = rf"(?:[;*:@({{\[{CLOSERS}{re.escape(ENDS.replace('.', ''))}])"


def train_punkt(paragraphs: Iterable[str]) -> PunktParameters:
    """Trains Punkt's parameters with nltk. Ten million characters take half a minute and 1 GB of
    memory.
    """
    trainer = PunktTrainer(lang_vars=LanguageVars())
    # With nltk's penalty a few "Mr" without a full stop would outweigh thousands with one.
    trainer.IGNORE_ABBREV_PENALTY = True
    trainer.train("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
    # The trainer also accepts words seen once before a comma or similar, most of them noise: count
    # again without them.
    trainer.find_abbrev_types()
    params = trainer.get_params()
    params.abbrev_types = {word for word in params.abbrev_types if ABBREVIATION.fullmatch(word)}
    trainer.freq_threshold(ortho_thresh=3)
    return params
