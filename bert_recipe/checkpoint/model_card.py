"""The model card (README.md) of a model folder, with metadata as the Hugging Face hub reads it.

A card that somebody has edited or written is kept: only one whose last line has the digest of the
text before it is replaced.
"""

import hashlib
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.sentence_folders import (
    MODULES_FILE,
    PAIR_CLASSIFIER_FILE,
    sentence_files,
)
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import listed
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.words import LONE_SURROGATE

CARD_FILE = "README.md"  # not in the manifest, so that it may be edited
OWN = "<!-- as written by the program: "
EMBEDDINGS, NUMBER = "embeddings", "a number"
CLASSIFIER = "ForSequenceClassification"
REMOTE_CODE = "auto_map"  # the key of a config whose classes transformers lacks

# By the ending of the model class: the hub's name of the task, a heading, and how it is used.
TASKS = {
    CLASSIFIER: ("text-classification", "a class for each text"),
    "ForTokenClassification": ("token-classification", "tags of words"),
    "ForQuestionAnswering": ("question-answering", "answers in passages"),
    "ForPreTraining": ("fill-mask", "pre-trained, masked words"),
    "ForMaskedLM": ("fill-mask", "pre-trained, masked words"),
    EMBEDDINGS: ("sentence-similarity", "sentence embeddings"),
}
INPUTS = {
    "text-classification": '--text "A gripping film."',
    "token-classification": '--text "Anna lived in Paris."',
    "question-answering": '--question "Where did Anna live?" --context "Anna lived in Paris."',
    "fill-mask": '--fill-mask "The capital of France is [MASK]."',
    "sentence-similarity": "--input texts.csv --text-column text --embed --output vectors.npy",
}
PAIR_INPUT = '--text "Where did Anna live?" --text-pair "Anna lived in Paris."'

TEMPLATE = """\
---
{{ metadata }}
---
# {{ cell(card.name) }}

{% if card.task %}
{{ cell(card.architecture) }}: {{ card.task[1] }}.

{% endif %}
{% if card.warning %}
**Warning**: {{ cell(card.warning) }}.

{% endif %}
{% if facts %}
| | |
|---|---|
{% for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{% endfor %}

{% endif %}
{% if scores %}
## Scores on {{ cell(card.scored_file) }}

| score | value |
|---|---|
{% for name, value in scores.items() %}
| {{ name }} | {{ "%.4g" | format(value) }} |
{% endfor %}

{% endif %}
{% if usage %}
{{ usage }}
{% endif %}
{% if card.command is not none %}
## How it was made

{{ fence }}bash
{{ card.command }}
{{ fence }}
{% endif %}
"""


@dataclass(frozen=True)
class ModelParts:
    """What a model folder has besides weights and config.

    name: of the model.
    max_length: of the texts of fine-tuning, in tokens.
    files: further ones, by name.
    command: what a user typed, with the names of files only.
    """

    tokenizer: Tokenizer
    name: str = ""
    max_length: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True)
class ModelCard:
    """name: of the model.
    architecture: its class.
    facts: rows of a table.
    command: how it was made.
    base: name of the model that it started from.
    scores: on the file `scored_file`.
    is_fitted: whether a linear layer was fitted to vectors: sentence-transformers' last module, or
        of pairs a file that only this project reads.
    needs_code: whether transformers needs code from the hub to read it.
    text_pairs: whether it is for two texts.
    outputs: of a classifier, for each text.
    warning: what its scores say against it.
    """

    name: str
    model_type: str
    architecture: str
    labels: tuple[str, ...] = ()
    is_embedding: bool = False
    is_fitted: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None
    base: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    scored_file: str = "held-out data"
    needs_code: bool = False
    text_pairs: bool = False
    outputs: str = "a class"
    warning: str = ""

    @property
    def task(self) -> tuple[str, str] | None:
        if self.is_embedding:
            return TASKS[EMBEDDINGS]
        if self.is_fitted:
            return self.classifier_task
        tasks = (task for ending, task in TASKS.items() if self.architecture.endswith(ending))
        task = next(tasks, None)
        return self.classifier_task if task is TASKS[CLASSIFIER] else task

    @property
    def classifier_task(self) -> tuple[str, str]:
        text = "pair of texts" if self.text_pairs else "text"
        how = ", by a linear layer on the vectors of an encoder as it is" if self.is_fitted else ""
        return TASKS[CLASSIFIER][0], f"{self.outputs} for each {text}{how}"

    @property
    def finite_scores(self) -> dict[str, float]:
        return {name: value for name, value in self.scores.items() if math.isfinite(value)}

    def metadata(self) -> str:
        """The YAML that the hub reads."""
        from huggingface_hub import EvalResult, ModelCardData

        library, tags = "transformers", [self.model_type]
        if self.is_embedding:
            library = "sentence-transformers"
            tags += ["sentence-transformers", "feature-extraction"]
        if self.is_fitted and not self.architecture.endswith(CLASSIFIER):
            library = "sentence-transformers"
        tag = self.task[0] if self.task is not None else None
        results = [
            EvalResult(
                task_type=tag,
                dataset_type="custom",
                dataset_name=printable(self.scored_file),
                metric_type=name,
                metric_value=round(float(value), 6),  # NumPy has numbers of its own
                metric_name=name.replace("_", " "),
            )
            for name, value in self.finite_scores.items()
            if tag is not None
        ]
        return ModelCardData(
            library_name=library,
            tags=tags,
            base_model=self.base,
            pipeline_tag=tag,
            model_name=printable(self.name) if results else None,
            eval_results=results or None,
        ).to_yaml()

    def text(self) -> str:
        from jinja2 import Template

        facts = {cell(name): cell(value) for name, value in self.facts.items()}
        if self.labels:
            facts["labels"] = listed([code_span(label) for label in self.labels], 20)
        template = Template(TEMPLATE, trim_blocks=True, lstrip_blocks=True)
        text = template.render(
            card=self,
            cell=cell,
            fence=backticks_around(self.command or "", at_least=3),
            facts=facts,
            scores={cell(name): value for name, value in self.finite_scores.items()},
            metadata=self.metadata(),
            usage="\n".join(self.usage()),
        )
        return printable(text.rstrip("\n") + "\n")

    def usage(self) -> list[str]:
        if self.task is None:
            return []
        tag = self.task[0]
        code = ", trust_remote_code=True" if self.needs_code else ""
        python = [
            "from transformers import pipeline",
            "",
            f'model = pipeline("{tag}", model="FOLDER"{code})',
        ]
        if self.is_embedding:
            python = [
                "from sentence_transformers import SentenceTransformer",
                "",
                'vectors = SentenceTransformer("FOLDER").encode(["A text."])',
            ]
        elif self.is_fitted and not self.architecture.endswith(CLASSIFIER):
            python = [
                "from sentence_transformers import SentenceTransformer",
                "",
                'logits = SentenceTransformer("FOLDER").encode(["A text."])  # of the labels',
            ]
            if self.outputs == NUMBER:
                python[-1] = 'numbers = SentenceTransformer("FOLDER").encode(["A text."])'
            if self.text_pairs:
                python[-1] = 'vectors = SentenceTransformer("FOLDER").encode(["A text."])'
        inputs = PAIR_INPUT if self.text_pairs else INPUTS[tag]
        command = f"python3 inference.py --init-checkpoint FOLDER {inputs}"
        return ["## Use", "", "```python", *python, "```", "", "```bash", command, "```", ""]

    def signed(self) -> str:
        """The text with the line by which `is_replaceable` knows it."""
        text = self.text()
        return f"{text}{OWN}{digest(text)} -->\n"


def card_of(
    architecture: str,
    config: ModelConfig,
    record: RunRecord,
    parts: ModelParts,
    step: int | None,
    scores: Mapping[str, float] = MappingProxyType({}),
    training_loss: float | None = None,
) -> ModelCard:
    """The card of a checkpoint. Of files it has the names only, since it may be published.
    training_loss: of the last update that was logged.
    """
    flags = record.arguments
    facts = {"task": record.phase, "step": f"{step:,}" if step is not None else "the best one"}
    for fact, flag in (
        ("training file", "train_file"),
        ("training data", "data_dir"),
        ("shards", "input_dir"),
    ):
        if flags.get(flag):
            facts[fact] = Path(flags[flag]).name
    if record.data is not None:
        facts["digest of the data"] = record.data
    facts["samples"] = f"{record.num_samples:,}"
    facts["seed"] = str(record.seed)
    if training_loss is not None:
        facts["training loss"] = f"{training_loss:.4g}"
    facts["date"] = date.today().isoformat()
    if parts.max_length:
        facts["longest text"] = f"{parts.max_length} tokens"
    base = None
    if flags.get("from_pretrained_params") is not None:
        base = ModelFolder(flags["from_pretrained_params"]).name
        facts["started from"] = base
    return ModelCard(
        name=parts.name or record.phase,
        model_type=config.model_type,
        architecture=architecture,
        labels=config.labels,
        is_embedding=MODULES_FILE in parts.files and not has_classifier(parts.files),
        is_fitted=has_classifier(parts.files),
        facts=facts,
        command=parts.command,
        base=as_base(base),
        scores=scores,
        scored_file=scored_data(flags),
        needs_code=REMOTE_CODE in config.to_dict(),
        text_pairs=bool(config.text_pairs),
        outputs=outputs_of(config),
    )


def outputs_of(config: ModelConfig) -> str:
    """What a classifier with this config predicts."""
    if config.is_number:
        return NUMBER
    return "several labels" if config.multi_label else "a class"


def has_classifier(names: Collection[str]) -> bool:
    """Whether the files of sentence-transformers called `names` have a classifier."""
    return any(name.endswith(("_Dense/config.json", PAIR_CLASSIFIER_FILE)) for name in names)


def scored_data(flags: Mapping[str, Any]) -> str:
    """What the scores of a run with these flags are of."""
    train_file = Path(flags.get("train_file") or "").name
    if share := flags.get("eval_fraction"):
        return f"{share:.0%} of {train_file}, held out"
    if count := flags.get("num_folds"):
        return f"one of {count} parts of {train_file}, held out"
    scored = flags.get("eval_file") or flags.get("eval_dir")
    if "eval_file" not in flags:  # of run_squad.py, where this is the file to score, too
        scored = scored or flags.get("predict_file")
    return Path(scored).name if scored else ModelCard.scored_file


def write_derived_card(
    folder: Path,
    name: str,
    program: str,
    sources: Sequence[str],
    base: str | None = None,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the card of a model that `program` made from `sources` in `folder`, which will be
    called `name`. base: the model that it is another form of.
    """
    model = ModelFolder(folder)
    names = [str(path.relative_to(folder)) for path in sentence_files(folder)]
    card = ModelCard(
        name=name,
        model_type=model.config.model_type,
        architecture=model.architecture or "",
        labels=model.config.labels,
        is_embedding=(folder / MODULES_FILE).is_file() and not has_classifier(names),
        is_fitted=has_classifier(names),
        facts={"made by": program, "made from": ", ".join(sources), **facts},
        base=as_base(base),
        needs_code=REMOTE_CODE in model.config.to_dict(),
        text_pairs=bool(model.config.text_pairs),
        outputs=outputs_of(model.config),
    )
    write_card(folder, card)


def as_base(name: str | None) -> str | None:
    """The name of a base model, if the hub accepts it."""
    return name if name and re.fullmatch(r"[\w.-]+", name) else None


def printable(text: str) -> str:
    """`text` without the lone surrogates of file names that are not UTF-8."""
    return LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def cell(text: str) -> str:
    """`text` as plain text of one line in Markdown, also in a table: names of files and models may
    look like HTML, links or code.
    """
    return re.sub(r"([\\`*\[\]<>&|])", r"\\\1", " ".join(text.split()))


def code_span(text: str) -> str:
    """`text` as code in a table of Markdown."""
    line = " ".join(text.split()).replace("|", "\\|")
    ticks = backticks_around(line, at_least=1)
    space = " " if "`" in line else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def backticks_around(text: str, at_least: int) -> str:
    """More backticks than follow each other in `text`, which would end the code."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(at_least, longest + 1)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_replaceable(path: Path) -> bool:
    """Whether there is no card, or one that nobody has edited."""
    if not path.exists():
        return True
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    body, mark, signature = text.rpartition(OWN)
    return bool(mark) and signature == f"{digest(body)} -->\n"


def write_card(folder: Path, card: ModelCard) -> None:
    if is_replaceable(folder / CARD_FILE):
        write_atomically(folder / CARD_FILE, card.signed())


def copy_card(step: Path, folder: Path, old: Path) -> None:
    """Copies the card of a checkpoint to `folder`, or that of the folder `old`, which it replaces,
    if somebody has written that.
    """
    source = step if is_replaceable(old / CARD_FILE) else old
    if (source / CARD_FILE).is_file():
        shutil.copyfile(source / CARD_FILE, folder / CARD_FILE)
