"""nltk's training of Punkt's parameters. A file of its own, as its import takes a second."""

import re
from collections.abc import Iterable

from nltk.tokenize.punkt import PunktLanguageVars, PunktTrainer

from bert_recipe.data_preparation.text.sentences import (
    CLOSERS,
    OPENERS,
    PunktParameters,
)
from bert_recipe.utils.words import SENTENCE_ENDS

ABBREVIATION = re.compile(r"[^\W\d_](?:[^\W\d_]|[.&'-])*")


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
