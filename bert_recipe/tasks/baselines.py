"""Scores of simple methods, from scikit-learn, which say whether a model is worth its training.

Legend: n rows, k texts of a row.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert_recipe.utils.errors import one_line
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.words import is_unspaced

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import Pipeline

BASELINES = "baselines"  # the key among the scores
WARNING = "warning"  # the key of what is wrong with the scores of a model
MAX_ROWS = 20_000  # of a training file
MAX_CHARACTERS = 5000  # of a text, so that whole books take seconds, too
MAX_WORDS = 50_000  # that have a weight
MAX_WEIGHTS = 1_000_000  # of all classes; also bounds rows times classes
UNSPACED_SHARE = 0.1  # of texts from which on characters are counted instead of words
FROZEN = "--frozen-encoder"  # the method that this flag is
ROWS = "training_rows"  # the key of their number where these are not all
CHANCE = 0.01  # below that, how likely a number of right rows is by chance, it is no chance
CORRELATIONS = ("matthews_correlation", "pearson", "spearman")

Scores = Mapping[str, float]


class Baselines(NamedTuple):
    """The scores of simple methods on a file.

    scores: by the name of the method; fractions, as those of the model, and maybe the number of
        `training_rows`.
    chance: the method that knows the frequencies of labels only, or None if that scores 0.
    num_scored: rows, or entities, of which the scores are shares.
    """

    scores: Mapping[str, Scores]
    chance: str | None
    num_scored: int


def joined(sets: Sequence[Baselines]) -> Baselines:
    """Those of several files, whose scores have other names."""
    scores: dict[str, Scores] = {}
    for baselines in sets:
        for name, values in baselines.scores.items():
            scores[name] = {**scores.get(name, {}), **values}
    return Baselines(scores, sets[0].chance, sets[0].num_scored)


def means_of(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """The means over runs, each with the scores of the same methods; without scores that one of
    them lacks.
    """
    means = {}
    for method, scores in runs[0].items():
        values: dict[str, list[Any]] = {
            name: [run[method].get(name) for run in runs] for name in scores
        }
        means[method] = {
            name: float(np.mean(numbers)) for name, numbers in values.items() if None not in numbers
        }
    return means


def drawn_rows(num_rows: int, num_classes: int = 1) -> np.ndarray:
    """Rows of a training file in its order: all, or as many as take seconds."""
    count = min(num_rows, MAX_ROWS, max(1000, MAX_WEIGHTS // num_classes))
    return np.sort(np.random.default_rng(0).permutation(num_rows)[:count])


def tfidf(texts: Iterable[str], num_classes: int = 1) -> "TfidfVectorizer":
    """Of words, or of one to three characters where texts have a script without spaces."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    max_features = min(MAX_WORDS, max(1000, MAX_WEIGHTS // num_classes))
    if has_no_spaces(texts):
        return TfidfVectorizer(analyzer="char", ngram_range=(1, 3), max_features=max_features)
    return TfidfVectorizer(max_features=max_features)


def has_no_spaces(texts: Iterable[str]) -> bool:
    return bool(np.mean([is_unspaced(text) for text in texts]) > UNSPACED_SHARE)


def tfidf_name(texts: Iterable[str], method: str) -> str:
    """Such as "tf-idf + ridge regression"."""
    of_characters = " of characters" if has_no_spaces(texts) else ""
    return f"tf-idf{of_characters} + {method}"


def tfidf_pipeline(
    texts_nk: np.ndarray, estimator: "BaseEstimator", num_classes: int
) -> "Pipeline":
    """The tf-idf of each text of a row side by side, of pairs also their cosine, and `estimator` on
    these.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import FunctionTransformer

    num_columns = texts_nk.shape[1]
    columns = []
    for place in range(num_columns):
        vectorizer = tfidf(texts_nk[:, place], num_classes * num_columns)
        columns.append((f"text {place + 1}", vectorizer, place))
    features = ColumnTransformer(columns)
    if num_columns == 2:
        cosines = FunctionTransformer(partial(tfidf_cosines, fit_tfidf(texts_nk)))
        features = make_union(features, cosines)
    return make_pipeline(features, estimator)


def fit_tfidf(texts_nk: np.ndarray) -> "TfidfVectorizer":
    """Of the words of all columns."""
    return tfidf(texts_nk[:, 0]).fit(texts_nk.ravel())


def tfidf_cosines(vectorizer: "TfidfVectorizer", texts_n2: np.ndarray) -> np.ndarray:
    """The cosine [n, 1] of the two texts of each row."""
    first, second = (vectorizer.transform(texts_n2[:, place]) for place in range(2))
    return np.asarray(first.multiply(second).sum(axis=1)).reshape(-1, 1)


def text_columns(texts: Sequence[str], pairs: Sequence[str] | None) -> np.ndarray:
    """The texts of each row, [n, k] strings."""
    columns = [texts] if pairs is None else [texts, pairs]
    cut = [[text[:MAX_CHARACTERS] for text in column] for column in columns]
    return np.array(cut, object).T


def once(compute: Callable[[], Baselines]) -> Callable[[], Baselines | None]:
    """`compute`, whose result is kept for further seeds. None, and a line that says why, where the
    texts have nothing to learn from.
    """

    @cache
    def baselines() -> Baselines | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as of 100 iterations that are not enough
                return compute()
        except ValueError as error:  # scikit-learn's, such as "empty vocabulary"
            print_line(f"note: no baseline beside the scores: {one_line(str(error))}")
            return None

    return baselines


def constant_loss(
    share_C: np.ndarray, weight_C: np.ndarray | None = None, smoothing: float = 0.0
) -> float:
    """The least mean cross-entropy of outputs that are the same for all samples.

    share_C: of the samples, by class.
    weight_C, smoothing: see torch.nn.functional.cross_entropy.
    """
    mass_C = (1 - smoothing) * share_C + smoothing / len(share_C)
    if weight_C is not None:
        mass_C = mass_C * weight_C
    positive = mass_C[mass_C > 0]
    return float(-(positive * np.log(positive / positive.sum())).sum())


def percent(value: float | None) -> str:
    return "not defined" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def comparison_line(
    name: str, shown: str, scores: Mapping[str, Scores], perfect: float = 1.0
) -> str:
    """The score `name` of a model, which is `shown`, beside those of the baselines. perfect: the
    highest score.
    """
    others = []
    for method, values in scores.items():
        rows = f" of {values[ROWS]:,.0f} rows" if ROWS in values else ""
        others.append(f"{method}{rows} {percent(values.get(name, math.nan) / perfect)}")
    return f"{name} {shown} ({', '.join(others)})"


def standard_error(name: str, value: float, num_scored: int) -> float:
    """Of a share of `num_scored` rows, or of a correlation."""
    if name.endswith(CORRELATIONS):
        return math.sqrt((1 - value**2) / max(1, num_scored - 2))
    return math.sqrt(value * (1 - value) / num_scored)


def chance_line(
    name: str,
    value: float,
    baselines: Baselines,
    advice: str,
    confusion_CC: Sequence[Sequence[int]] = (),
) -> str | None:
    """A warning if the score of a model is not above that of the most frequent class by more than
    its own standard error, else None.

    advice: what to try.
    confusion_CC: of classes; rows are the true ones.
    """
    chance = 0.0  # of correlations, entities and rankings
    what = "0"
    if baselines.chance is not None:
        chance = baselines.scores[baselines.chance][name]
        what = f"that of the {baselines.chance} ({percent(chance)})"
    if math.isnan(value) or math.isnan(chance):
        return None
    error = standard_error(name, value, baselines.num_scored)
    if value - chance > error:
        return None
    head = f"{name} {percent(value)} is not above {what} by more than its own error"
    if confusion_CC and (rarer := rarer_classes(np.array(confusion_CC))):
        return f"{head} ({percent(error)}), but {rarer}: judge it by precision and recall of these"
    return (
        f"{head} ({percent(error)}): do not use this model, since these rows do not show that it "
        f"has learnt; try {advice}, and check the labels"
    )


def frozen_line(name: str, value: float, baselines: Baselines) -> str | None:
    """A note if --frozen-encoder scores higher than a model by more than its standard error."""
    frozen = baselines.scores.get(FROZEN, {}).get(name, math.nan)
    if math.isnan(value):  # the correlation of a constant
        value = 0.0
    if not frozen - value > standard_error(name, value, baselines.num_scored):
        return None
    return (
        f"{FROZEN} has {name} {percent(frozen)}: add it, with another --output-dir; it leaves the "
        "encoder as it is, and fits a classifier to its vectors in seconds"
    )


def rarer_classes(confusion_CC: np.ndarray) -> str | None:
    """How often another class than the most frequent one is right, if that is no chance, else None.
    Of predictions in random order, the number of right ones is hypergeometric for two classes
    (Fisher's exact test), and for several about a Poisson number, whose tail is the longer one.
    """
    from scipy.stats import hypergeom, poisson

    supports_C, predicted_C = confusion_CC.sum(axis=1), confusion_CC.sum(axis=0)
    is_rarer_C = supports_C < supports_C.max()
    num_right = confusion_CC.diagonal()[is_rarer_C].sum()
    expected = (supports_C * predicted_C)[is_rarer_C].sum() / supports_C.sum()
    if num_right == 0:
        return None
    number = poisson(expected)
    if len(supports_C) == 2:
        number = hypergeom(supports_C.sum(), supports_C[is_rarer_C], predicted_C[is_rarer_C])
    if number.sf(num_right - 1) > CHANCE:
        return None
    return (
        f"of {predicted_C[is_rarer_C].sum()} rows for which it predicts rarer classes {num_right} "
        f"are right, and {expected:.1f} would be by chance"
    )


def for_json(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """JSON has no NaN: scores that are not defined are None."""
    return {
        method: {name: None if math.isnan(value) else value for name, value in values.items()}
        for method, values in scores.items()
    }
