#!/usr/bin/env python3
"""Inference: question answering, text classification, and masked-word prediction.

    python3 inference.py --init-checkpoint FOLDER --question "Where did Anna live?" --context "Anna lived in Paris."
    python3 inference.py --init-checkpoint FOLDER --text "A gripping film." --n-best-size 2
    python3 inference.py --init-checkpoint FOLDER --fill-mask "The capital of France is [MASK]."

The task must match the head of the model in FOLDER, which also provides config, vocabulary and casing. Without a
question or text, the program prompts for them.

    python3 inference.py --init-checkpoint FOLDER --input reviews.csv --output scored.csv --text-column review
    python3 inference.py --init-checkpoint FOLDER --input reviews.csv --output vectors.npy --text-column review --embed

predict all rows of a file (CSV, TSV or JSON lines, optionally .gz; Parquet).
"""

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bert_config import ModelConfig, ModernBertConfig
from checkpoint.folder import CONFIG_FILE, find_model_folder
from checkpoint.model_choice import choose_model
from checkpoint.weights import open_model_weights
from evaluation import check_finite, predict
from modeling import MODELS
from parallel.base import ParallelModel
from parallel.runtime import Runtime
from run_config import CUSTOM, ModelSelection, PredictionConfig, StartConfig
from run_setup import load_fine_tuned
from tasks.glue import TextDataset
from tasks.glue_files import Examples
from tasks.squad import SquadTask
from tasks.squad_file import Question, Squad
from tasks.text_files import Row, predict_file
from tasks.text_sequences import SequenceDataset
from tokenizer import MASK, BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, optional_path, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import UserError, one_line
from utils.files import file_digest, read_json, read_json_object
from utils.progress import print_line

MAX_WINDOW = 384  # tokens of question and passage window; fewer if the model has fewer positions
ASKED = ("question", "context", "context_file", "text", "text_pair", "fill_mask")
WEIGHTS = (".safetensors", ".bin")
EXCERPT = 500  # characters of context shown before and after the answer


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_argument_group("model")
    model.add_argument(
        "--init-checkpoint",
        dest="from_pretrained_params",
        type=Path,
        required=True,
        help="a checkpoint or Hugging Face model folder, or a folder of steps",
    )
    model.add_argument(
        "--config-file", type=optional_path, help="the architecture; by default the folder's, with its vocabulary"
    )
    model.add_argument("--vocab-file", type=optional_path, help="the vocabulary; by default the folder's")
    model.add_argument("--do-lower-case", action=BooleanFlag, default=None, help="by default as the folder says")
    model.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--n-best-size", type=positive_int, default=5, help="results to show")
    parser.add_argument(
        "--max-seq-length",
        type=positive_int,
        help=f"maximum tokens of question and window together, by default {MAX_WINDOW}; or of a text, by default as "
        "many as the model has positions",
    )
    questions = parser.add_argument_group("a question about a passage (a model of run_squad.py)")
    questions.add_argument("--question", help="the question")
    questions.add_argument("--context", help="the passage")
    questions.add_argument("--context-file", type=optional_path, help="a text file with the passage")
    questions.add_argument(
        "--doc-stride", type=positive_int, help="tokens between the starts of windows; by default 128"
    )
    questions.add_argument("--max-answer-length", type=positive_int, help="maximum tokens of an answer; by default 30")
    questions.add_argument("--version-2-with-negative", action=BooleanFlag, help="there may be no answer")
    texts = parser.add_argument_group("a text to classify (a model of run_glue.py)")
    texts.add_argument("--text", help="the text")
    texts.add_argument("--text-pair", help="the second text, for a model of pairs")
    masks = parser.add_argument_group("masked words (a model of run_pretraining.py)")
    masks.add_argument("--fill-mask", metavar="TEXT", help=f"a text with one or more {MASK}")
    files = parser.add_argument_group("a whole file: .csv, .tsv or .jsonl, also .gz, or .parquet")
    files.add_argument("--input", type=optional_path, help="file to predict")
    files.add_argument("--output", type=optional_path, help="file for the input's columns and the predictions")
    files.add_argument("--text-column", help="column of the text")
    files.add_argument("--pair-column", help="column of the second text, for a model of pairs")
    files.add_argument("--question-column", help="column of the question")
    files.add_argument("--context-column", help="column of the passage")
    files.add_argument("--truncate", action=BooleanFlag, help="cut texts that are too long, instead of an error")
    files.add_argument(
        "--embed", action=BooleanFlag, help="write sentence embeddings, as the folder's sentence-transformers files say"
    )
    files.add_argument("--batch-size", type=positive_int, default=32, help="sequences per forward pass")
    args = parser.parse_args(argv)
    if (args.input is None) != (args.output is None):
        parser.error("--input and --output go together: give both or neither")
    names = ("text_column", "pair_column", "question_column", "context_column", "truncate", "embed", "batch_size")
    parser.refuse_without_effect(args, [(names, args.input, "--input")])
    if args.input is not None and any(getattr(args, name) is not None for name in ASKED):
        parser.error("--input and a question or text were both given: give one of them")
    if args.input is not None and (args.text_column is None) == (args.question_column is None):
        parser.error("--input needs --text-column, or --question-column and --context-column")
    if (args.question_column is None) != (args.context_column is None):
        parser.error("--question-column and --context-column go together: give both or neither")
    parser.refuse_without_effect(args, [(("pair_column", "truncate", "embed"), args.text_column, "--text-column")])
    if args.context is not None and args.context_file is not None:
        parser.error("--context and --context-file: give one of them")
    if args.question is not None and args.context is None and args.context_file is None:
        parser.error("--question needs --context or --context-file")
    if args.text_pair is not None and args.text is None:
        parser.error("--text-pair needs --text")
    return args


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedModel:
    parallel: ParallelModel
    tokenizer: BertTokenizer
    config: ModelConfig
    max_seq_length: int
    runtime: Runtime
    batch_size: int = 8

    def logits(self, dataset: SequenceDataset, axis: str) -> np.ndarray:
        """See evaluation.predict."""
        return predict(self.parallel, dataset, axis, PredictionConfig(self.batch_size), self.runtime)[0]


def open_model(args: Arguments, head: "Head", folder: Path) -> LoadedModel:
    selection = ModelSelection(CUSTOM, False, args.config_file, args.vocab_file, args.do_lower_case)
    choice = choose_model(selection, StartConfig(from_pretrained_params=folder))
    config = choice.config
    longest = MAX_WINDOW if head.name == "question_answering" else config.max_position_embeddings
    max_seq_length = args.max_seq_length or min(longest, config.max_position_embeddings)
    if max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"--max-seq-length {max_seq_length} is above the config's max_position_embeddings "
            f"{config.max_position_embeddings}: lower it"
        )
    runtime = Runtime(select_device(args.device))
    parallel = load_fine_tuned(head.name, config, folder, runtime, log=lambda _text: None)
    parallel.prepare_for_inference(torch.float32)
    tokenizer = BertTokenizer(choice.vocab_file, choice.do_lower_case)
    return LoadedModel(parallel, tokenizer, config, max_seq_length, runtime, args.batch_size)


# --- a question about a passage ---------------------------------------------------------------------------------------


def squad_task(model: LoadedModel, args: Arguments) -> SquadTask:
    return SquadTask(
        model.max_seq_length,
        args.doc_stride or SquadTask.doc_stride,
        # A model with few positions may have no room for the default 64 question tokens.
        min(SquadTask.max_query_length, max(1, model.max_seq_length // 2 - 4)),
        args.version_2_with_negative,
        max(SquadTask.n_best_size, args.n_best_size),
        args.max_answer_length or SquadTask.max_answer_length,
    )


def answer_question(model: LoadedModel, question: str, context: str, args: Arguments) -> None:
    for what, text in (("question", question), ("passage", context)):
        if not model.tokenizer.encode(text):
            raise UserError(f"the {what} has no words: give a text")
    task = squad_task(model, args)
    check_length("question", len(model.tokenizer.encode(question)), task.max_query_length)
    squad = Squad(Path("passage"), [context], [Question("question", question, 0, ())], args.version_2_with_negative)
    dataset = task.dataset(squad, model.tokenizer)
    predictions = task.answers(dataset, model.logits(dataset, "token"))
    text, candidates = predictions.answers["question"], predictions.nbest["question"]
    probability = next(candidate["probability"] for candidate in candidates if candidate["text"] == text)
    print_line(f"answer       {one_line(text) or no_answer(args)}")
    print_line(f"probability  {probability:.3f}")
    print_line("n best")
    for candidate in candidates[: args.n_best_size]:
        print_line(f"  {candidate['probability']:.3f}  {one_line(candidate['text']) or no_answer(args)}")
    if text:
        print_line("passage")
        print_line(f"  {marked(context, *predictions.characters['question'])}")


def no_answer(args: Arguments) -> str:
    return "(the passage has no answer)" if args.version_2_with_negative else "(none found)"


def marked(context: str, start: int, stop: int) -> str:
    """The answer with its context. The answer is bold on a terminal and enclosed in ** elsewhere."""
    on, off = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("**", "**")
    before = "... " * (start > EXCERPT) + context[max(0, start - EXCERPT) : start]
    after = context[stop : stop + EXCERPT] + " ..." * (len(context) > stop + EXCERPT)
    left, middle, right = (one_line(f"|{part}|")[1:-1] for part in (before, context[start:stop], after))
    return f"{left.lstrip()}{on}{middle}{off}{right.rstrip()}"


def ask_questions(model: LoadedModel, args: Arguments) -> None:
    context = read_context(args)
    if args.question is not None:
        answer_question(model, args.question, context, args)
    elif context is not None:
        ask("question", lambda question: answer_question(model, question, context, args))
    else:
        ask(
            "passage", lambda passage: ask("question", lambda question: answer_question(model, question, passage, args))
        )


def read_context(args: Arguments) -> str | None:
    if args.context_file is None:
        return args.context
    if not args.context_file.is_file():
        raise UserError(f"--context-file {args.context_file} does not exist: check the path")
    try:
        return args.context_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--context-file {args.context_file} is not UTF-8: save it as UTF-8") from error


# --- a text to classify -----------------------------------------------------------------------------------------------


def check_length(what: str, tokens: int, maximum: int) -> None:
    if tokens > maximum:
        raise UserError(f"the {what} has {tokens} tokens, and at most {maximum} are possible: shorten it")


def classify(model: LoadedModel, text: str, pair: str | None, args: Arguments) -> None:
    tokens = [len(model.tokenizer.encode(part)) + 1 for part in (text, pair) if part is not None]
    check_length("text", sum(tokens) + 1, model.max_seq_length)
    examples = Examples(Path("text"), [text], None if pair is None else [pair], None, ["0"], [1])
    dataset = TextDataset(examples, model.tokenizer, model.max_seq_length)
    (logits_C,) = torch.from_numpy(model.logits(dataset, "sequence"))
    if len(logits_C) == 1:
        print_line(f"score        {float(logits_C):.4f}")
        return
    labels = model.config.labels or [f"LABEL_{index}" for index in range(len(logits_C))]
    scores_C = logits_C.sigmoid() if model.config.multi_label else logits_C.softmax(0)
    probabilities, indices = scores_C.sort(descending=True)
    print_line(f"label        {labels[indices[0]]}")
    print_line(f"probability  {float(probabilities[0]):.3f}")
    print_line("n best")
    for probability, index in list(zip(probabilities.tolist(), indices.tolist(), strict=True))[: args.n_best_size]:
        print_line(f"  {probability:.3f}  {labels[index]}")


def classify_texts(model: LoadedModel, args: Arguments) -> None:
    if args.text is not None:
        classify(model, args.text, args.text_pair, args)
    else:
        ask("text (a tab before the second text of a pair)", lambda line: classify(model, *split_pair(line), args))


def split_pair(line: str) -> tuple[str, str | None]:
    text, tab, pair = line.partition("\t")
    return text, pair if tab else None


# --- masked words -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def fill_mask(model: LoadedModel, text: str, args: Arguments) -> None:
    tokenizer, parts = model.tokenizer, text.split(MASK)
    if len(parts) == 1:
        raise UserError(f"the text has no {MASK}: write it where a word is missing")
    ids = [tokenizer.cls_token_id]
    positions = []
    for part in parts:
        ids += [*tokenizer.encode(part), tokenizer.mask_token_id]
        positions.append(len(ids) - 1)
    ids[-1] = tokenizer.sep_token_id  # no mask after the last part
    positions.pop()
    check_length("text", len(ids), model.max_seq_length)
    device = model.runtime.device
    model.parallel.model.eval()
    logits_MV = model.parallel.model(
        torch.tensor([ids], device=device), mlm_positions=torch.tensor(positions, device=device)
    ).prediction_logits[:, : tokenizer.vocab_size]
    check_finite(logits_MV)
    probabilities_MK, ids_MK = logits_MV.float().softmax(1).topk(min(args.n_best_size, tokenizer.vocab_size))
    filled = parts[0]
    for part, ids_K in zip(parts[1:], ids_MK.tolist(), strict=True):
        filled += tokenizer.convert_ids_to_tokens(ids_K[0]) + part
    print_line(f"text         {one_line(filled)}")
    for number, (probabilities_K, ids_K) in enumerate(zip(probabilities_MK.tolist(), ids_MK.tolist(), strict=True), 1):
        print_line("n best" if len(positions) == 1 else f"n best of {MASK} {number}")
        for probability, token_id in zip(probabilities_K, ids_K, strict=True):
            print_line(f"  {probability:.3f}  {tokenizer.convert_ids_to_tokens(token_id)}")


def fill_masks(model: LoadedModel, args: Arguments) -> None:
    if args.fill_mask is not None:
        fill_mask(model, args.fill_mask, args)
    else:
        ask(f"text with {MASK}", lambda text: fill_mask(model, text, args))


# --- a whole file -----------------------------------------------------------------------------------------------------


def predict_all_rows(args: Arguments, head: "Head", folder: Path) -> None:
    model = open_model(args, head, folder)
    embedding = EmbeddingConfig.read(folder) if args.embed else None
    if embedding is not None and args.max_seq_length is None:
        model = replace(model, max_seq_length=min(model.max_seq_length, embedding.max_seq_length))
    if head.name == "masked_lm":
        raise UserError(f"{folder} is not fine-tuned: fine-tune it, or add --embed")
    if (args.question_column is not None) != (head.name == "question_answering"):
        raise UserError(f"{folder} is a model of {head.made_by}, which needs other columns: see --help")

    def predict_rows(rows: list[tuple[int, Row]]) -> list[Row]:
        if args.question_column is not None:
            return answer_rows(model, rows, args)
        logits = model.logits(text_dataset(model, rows, args), "sequence")
        if embedding is not None:
            return [{"embedding": row.tolist()} for row in embedding.finish(logits)]
        return [class_columns(model.config, torch.from_numpy(row)) for row in logits]

    columns = [args.text_column, args.pair_column, args.question_column, args.context_column]
    settings = {key: value for key, value in args.as_dict().items() if key not in ("input", "output", "device")}
    settings["weights"] = [file_digest(path) for path in sorted(folder.glob("*")) if path.suffix in WEIGHTS]
    predict_file(args.input, args.output, [name for name in columns if name is not None], predict_rows, settings)


def text_dataset(model: LoadedModel, rows: list[tuple[int, Row]], args: Arguments) -> TextDataset:
    texts = [row[args.text_column] for _, row in rows]
    pairs = [row[args.pair_column] for _, row in rows] if args.pair_column is not None else None
    examples = Examples(args.input, texts, pairs, None, [], [line for line, _ in rows])
    if not args.truncate:
        whole = TextDataset(examples, model.tokenizer, 2**30)
        for line, length in zip(examples.lines, whole.lengths, strict=True):
            if length > model.max_seq_length:
                raise UserError(
                    f"{args.input}, line {line}: the text has {length} tokens, and at most {model.max_seq_length} are "
                    "possible: shorten it, or add --truncate"
                )
    return TextDataset(examples, model.tokenizer, model.max_seq_length)


def class_columns(config: ModelConfig, logits_C: torch.Tensor) -> Row:
    """The predicted label(s) and the probability of each class, or the score for regression."""
    if len(logits_C) == 1:
        return {"score": float(logits_C)}
    labels = config.labels or [f"LABEL_{index}" for index in range(len(logits_C))]
    probabilities = (logits_C.sigmoid() if config.multi_label else logits_C.softmax(0)).tolist()
    by_label = {f"probability {label}": value for label, value in zip(labels, probabilities, strict=True)}
    if config.multi_label:
        return {"labels": [label for label, value in zip(labels, probabilities, strict=True) if value > 0.5]} | by_label
    return {"label": labels[int(logits_C.argmax())]} | by_label


def answer_rows(model: LoadedModel, rows: list[tuple[int, Row]], args: Arguments) -> list[Row]:
    task = squad_task(model, args)
    for line, row in rows:
        tokens = len(model.tokenizer.encode(row[args.question_column]))
        check_length(f"question of {args.input}, line {line},", tokens, task.max_query_length)
    questions = [Question(str(line), row[args.question_column], i, ()) for i, (line, row) in enumerate(rows)]
    contexts = [row[args.context_column] for _, row in rows]
    dataset = task.dataset(Squad(args.input, contexts, questions, args.version_2_with_negative), model.tokenizer)
    predictions = task.answers(dataset, model.logits(dataset, "token"))
    columns = []
    for question in questions:
        text = predictions.answers[question.id]
        candidates = predictions.nbest[question.id]
        found = (candidate["probability"] for candidate in candidates if candidate["text"] == text)
        columns.append({"answer": text, "probability": next(found)})
    return columns


@dataclass(frozen=True)
class EmbeddingConfig:
    """Pooling and normalization of a sentence-transformers folder. Without its files: mean pooling, no normalization,
    which is sentence-transformers' default."""

    max_seq_length: int = 2**30
    normalize: bool = False

    @classmethod
    def read(cls, folder: Path) -> "EmbeddingConfig":
        if not (folder / "modules.json").is_file():
            return cls()
        modules = {
            entry["type"].rpartition(".")[2]: entry["path"] for entry in read_json(folder / "modules.json", "modules")
        }
        pooling = read_json_object(folder / modules.get("Pooling", "") / "config.json", "the pooling's config")
        modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        if modes != ["pooling_mode_mean_tokens"] or modules.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise UserError(
                f"{folder} embeds with {', '.join([*modules, *modes])}: only the mean of tokens is supported"
            )
        file = folder / "sentence_bert_config.json"
        limit = read_json_object(file, "the config").get("max_seq_length") if file.is_file() else None
        return cls(limit or cls.max_seq_length, "Normalize" in modules)

    def finish(self, means_NE: np.ndarray) -> np.ndarray:
        norms_N1 = np.linalg.norm(means_NE, axis=1, keepdims=True)
        return means_NE / np.maximum(norms_N1, 1e-12) if self.normalize else means_NE


# --- the heads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A model head: `name` is a key of modeling.MODELS, `prefix` starts the names of its tensors in BERT, and `flags`
    apply only to it."""

    name: str
    prefix: str
    use: Callable[[LoadedModel, Arguments], None]
    flags: tuple[str, ...]
    made_by: str


HEADS = (
    Head(
        "question_answering",
        "qa_outputs.",
        ask_questions,
        ("question", "context", "context_file", "doc_stride", "max_answer_length", "version_2_with_negative"),
        "run_squad.py",
    ),
    Head(
        "sequence_classification",
        "classifier.",
        classify_texts,
        ("text", "text_pair"),
        "run_glue.py",
    ),
    Head(
        "masked_lm",
        "cls.predictions.",
        fill_masks,
        ("fill_mask",),
        "run_pretraining.py",
    ),
)


EMBEDDING = Head("sentence_embedding", "", lambda _model, _args: None, (), "sentence-transformers")


def choose_head(args: Arguments, folder: Path) -> Head:
    """The head in `folder` that matches the flags. Raises UserError if there is none."""
    config = read_json_object(folder / CONFIG_FILE, "the config")
    if config.get("model_type") == ModernBertConfig.model_type:  # its classifiers have the same tensor names
        heads = {model.__name__: name for name, model in MODELS[ModernBertConfig].items()}
        found = [head for head in HEADS if head.name in map(heads.get, config.get("architectures") or ())]
    else:
        names = tuple(open_model_weights(folder))
        found = [head for head in HEADS if any(name.startswith(head.prefix) for name in names)]
    if not found:
        raise UserError(f"{folder} has no head to ask: fine-tune it with run_squad.py or run_glue.py")
    asked = [head for head in HEADS if any(getattr(args, flag) not in (None, False) for flag in head.flags)]
    if len(asked) > 1:
        raise UserError(f"the flags are for models of {' and of '.join(head.made_by for head in asked)}: choose one")
    if asked and asked[0] not in found:
        raise UserError(
            f"{folder} is a model of {found[0].made_by}, and these flags are for one of {asked[0].made_by}: give other "
            f"flags or another folder"
        )
    return asked[0] if asked else found[0]


def read_line(prompt: str) -> str:
    """A line from the terminal or a pipe; empty at the end of the input."""
    if sys.stdin is None:
        raise UserError("standard input is closed: give the text on the command line")
    try:
        return input(f"{prompt}: ").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8: convert it first") from error


def ask(prompt: str, answer: Callable[[str], None]) -> None:
    """Prompts for lines and calls `answer` with each, until an empty line."""
    while line := read_line(prompt):
        try:
            answer(line)
        except UserError as error:
            print_line(f"error: {one_line(str(error))}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    path = args.from_pretrained_params
    set_num_threads()
    if path.is_file():
        raise UserError(f"--init-checkpoint {path} is a file: make a folder with convert_checkpoint.py")
    folder = find_model_folder(path)
    head = EMBEDDING if args.embed else choose_head(args, folder)
    if args.input is not None:
        predict_all_rows(args, head, folder)
    else:
        head.use(open_model(args, head, folder), args)
    return 0


if __name__ == "__main__":
    run_main(main)
