"""A baseline of questions: the sentence of the passage that looks most like the question."""

import re
from collections import Counter

from bert_recipe.tasks.squad.files import Squad
from bert_recipe.tasks.squad.scores import evaluate, normalized

SENTENCE = "most similar sentence"  # of the passage
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？।])")


def sentence_f1(squad: Squad) -> float:
    """The F1, a fraction, of answering each question with the sentence of its passage that shares
    most words with it, each counted by one over the sentences that have it.
    """
    sentences_of = [SENTENCE_ENDS.split(context) for context in squad.contexts]
    words_of = [[set(normalized(text).split()) for text in texts] for texts in sentences_of]
    answers = {}
    for question in squad.questions:
        sets = words_of[question.context]
        counts = Counter(word for words in sets for word in words)
        asked = set(normalized(question.text).split())
        shared = [sum(1 / counts[word] for word in words & asked) for words in sets]
        answers[question.id] = sentences_of[question.context][shared.index(max(shared))]
    return evaluate(squad, answers)["f1"] / 100
