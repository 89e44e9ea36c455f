#!/usr/bin/env python3
"""Asks a model: answers a question about a passage, classifies a text, or fills masked words.

    python3 inference.py --init-checkpoint FOLDER --question "Where did Anna live?" --context "Anna lived in Paris."
    python3 inference.py --init-checkpoint FOLDER --text "A gripping film." --n-best-size 2
    python3 inference.py --init-checkpoint FOLDER --fill-mask "The capital of France is [MASK]."

The head in FOLDER decides which of the three a model can do. Config, vocabulary and casing are those of FOLDER. Without
a question or text, it asks for them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bert_config import BertConfig
from checkpoint.folder import find_model_folder
from checkpoint.model_choice import choose_model
from checkpoint.weights import open_model_weights
from device import Runtime, select_device, set_num_threads
from evaluation import predict
from modeling import BertForPreTraining, BertForQuestionAnswering, BertForSequenceClassification
from parallel.base import ParallelModel
from run_config import CUSTOM, ModelSelection, PredictionConfig, StartConfig
from run_setup import load_fine_tuned
from tasks.glue import TextDataset
from tasks.glue_files import Examples
from tasks.squad import SquadTask
from tasks.squad_file import Question, Squad
from tasks.text_sequences import SequenceDataset
from tokenizer import MASK, BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, optional_path, positive_int
from utils.errors import UserError, one_line, run_main
from utils.progress import print_line

MAX_SEQ_LENGTH = 384  # unless the model has fewer positions
EXCERPT = 500  # characters of the passage that are shown before and after the answer


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
        help=f"maximum tokens of question and window together, or of a text; by default {MAX_SEQ_LENGTH}",
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
    args = parser.parse_args(argv)
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
    config: BertConfig
    max_seq_length: int
    runtime: Runtime

    def logits(self, dataset: SequenceDataset, axis: str) -> np.ndarray:
        """See evaluation.predict."""
        return predict(self.parallel, dataset, axis, PredictionConfig(batch_size=8), self.runtime)[0]


def open_model(args: Arguments, head: "Head", folder: Path) -> LoadedModel:
    selection = ModelSelection(CUSTOM, False, args.config_file, args.vocab_file, args.do_lower_case)
    choice = choose_model(selection, StartConfig(from_pretrained_params=folder))
    config = choice.config
    max_seq_length = args.max_seq_length or min(MAX_SEQ_LENGTH, config.max_position_embeddings)
    if max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"--max-seq-length {max_seq_length} is above the config's max_position_embeddings "
            f"{config.max_position_embeddings}: lower it"
        )
    runtime = Runtime(select_device(args.device))
    parallel = load_fine_tuned(head.model_class, config, folder, (head.prefix,), runtime, log=lambda _text: None)
    parallel.prepare_for_inference(torch.float32)
    tokenizer = BertTokenizer(choice.vocab_file, choice.do_lower_case)
    return LoadedModel(parallel, tokenizer, config, max_seq_length, runtime)


# --- a question about a passage ---------------------------------------------------------------------------------------


def answer_question(model: LoadedModel, question: str, context: str, args: Arguments) -> None:
    for what, text in (("question", question), ("passage", context)):
        if not model.tokenizer.encode(text):
            raise UserError(f"the {what} has no words: give a text")
    squad = Squad(Path("passage"), [context], [Question("question", question, 0, ())], args.version_2_with_negative)
    # A model of few positions may leave no room for the usual 64 tokens of the question.
    max_query_length = min(64, max(1, model.max_seq_length // 2 - 4))
    task = SquadTask(
        model.max_seq_length,
        args.doc_stride or SquadTask.doc_stride,
        max_query_length,
        args.version_2_with_negative,
        max(SquadTask.n_best_size, args.n_best_size),
        args.max_answer_length or SquadTask.max_answer_length,
    )
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
        print_line(f"  {one_line(marked(context, *predictions.characters['question']))}")


def no_answer(args: Arguments) -> str:
    return "(the passage has no answer)" if args.version_2_with_negative else "(none found)"


def marked(context: str, start: int, stop: int) -> str:
    """The surroundings of the answer, with the answer in bold on a terminal and between ** elsewhere."""
    on, off = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("**", "**")
    before, after = context[max(0, start - EXCERPT) : start], context[stop : stop + EXCERPT]
    before = f"... {before}" if start > EXCERPT else before
    after = f"{after} ..." if len(context) > stop + EXCERPT else after
    return f"{before}{on}{context[start:stop]}{off}{after}"


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


def classify(model: LoadedModel, text: str, pair: str | None, args: Arguments) -> None:
    examples = Examples(Path("text"), [text], None if pair is None else [pair], None, ["0"], [1])
    dataset = TextDataset(examples, model.tokenizer, model.max_seq_length)
    (logits_C,) = torch.from_numpy(model.logits(dataset, "sequence"))
    if len(logits_C) == 1:
        print_line(f"score        {float(logits_C):.4f}")
        return
    labels = model.config.labels or [f"LABEL_{index}" for index in range(len(logits_C))]
    probabilities, indices = logits_C.softmax(0).sort(descending=True)
    print_line(f"label        {labels[indices[0]]}")
    print_line(f"probability  {float(probabilities[0]):.3f}")
    print_line("n best")
    for probability, index in list(zip(probabilities.tolist(), indices.tolist(), strict=True))[: args.n_best_size]:
        print_line(f"  {probability:.3f}  {labels[index]}")


def classify_texts(model: LoadedModel, args: Arguments) -> None:
    if args.text is not None:
        classify(model, args.text, args.text_pair, args)
    else:
        ask(
            "text", lambda text: classify(model, text, read_line("second text, if the model is of pairs") or None, args)
        )


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
    ids[-1] = tokenizer.sep_token_id  # a mask stands between two parts, so there is none after the last
    positions.pop()
    if len(ids) > model.max_seq_length:
        raise UserError(f"the text has {len(ids)} tokens, and at most {model.max_seq_length} are possible: shorten it")
    device = model.runtime.device
    model.parallel.model.eval()
    logits_MV = model.parallel.model(
        torch.tensor([ids], device=device), mlm_positions=torch.tensor(positions, device=device)
    ).prediction_logits[:, : tokenizer.vocab_size]
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


# --- the heads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """What a model with tensors named `prefix...` can do; `flags` are for such models only."""

    prefix: str
    model_class: type
    use: Callable[[LoadedModel, Arguments], None]
    flags: tuple[str, ...]
    made_by: str


HEADS = (
    Head(
        "qa_outputs.",
        BertForQuestionAnswering,
        ask_questions,
        ("question", "context", "context_file", "doc_stride", "max_answer_length", "version_2_with_negative"),
        "run_squad.py",
    ),
    Head("classifier.", BertForSequenceClassification, classify_texts, ("text", "text_pair"), "run_glue.py"),
    Head("cls.predictions.", BertForPreTraining, fill_masks, ("fill_mask",), "run_pretraining.py"),
)


def choose_head(args: Arguments, folder: Path) -> Head:
    """The head in `folder` that the flags are for. Raises UserError if it has no such head."""
    names = tuple(open_model_weights(folder))
    found = [head for head in HEADS if any(name.startswith(head.prefix) for name in names)]
    if not found:
        raise UserError(f"{folder} has no head to ask: fine-tune it with run_squad.py or run_glue.py")
    asked = [head for head in HEADS if any(getattr(args, flag) not in (None, False) for flag in head.flags)]
    if len(asked) > 1:
        raise UserError(f"the flags are for models of {' and of '.join(head.made_by for head in asked)}: choose one")
    if asked and asked[0] not in found:
        raise UserError(
            f"{folder} has no tensors {asked[0].prefix}*, but {found[0].prefix}*: it is a model of {found[0].made_by}, "
            f"and these flags are for one of {asked[0].made_by}"
        )
    return asked[0] if asked else found[0]


def read_line(prompt: str) -> str:
    """A line from the terminal; empty at the end of the input."""
    try:
        return input(f"{prompt}: ").strip()
    except EOFError:
        return ""


def ask(prompt: str, answer: Callable[[str], None]) -> None:
    """Calls `answer` with each line that is typed, until an empty one."""
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
    head = choose_head(args, folder)
    head.use(open_model(args, head, folder), args)
    return 0


if __name__ == "__main__":
    run_main(main)
