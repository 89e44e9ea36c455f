"""The flags of inference.py, by what they are for."""

from pathlib import Path

from bert_recipe.config import MAX_LENGTH, RuntimeConfig
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.tasks.squad.options import SquadOptions
from bert_recipe.utils.command_line import (
    REQUIRED,
    Flag,
    bounded_int,
    flags_of,
    optional_path,
    positive_int,
)

FLAGS = {
    "model": (
        Flag(
            "--init-checkpoint --from-pretrained-params",
            Path,
            REQUIRED,
            "a checkpoint or Hugging Face model folder, or a folder of steps",
        ),
        Flag(
            "--config-file",
            optional_path,
            None,
            "the architecture; by default the folder's, with its vocabulary",
        ),
        Flag("--vocab-file", optional_path, None, "the vocabulary; by default the folder's"),
        Flag("--do-lower-case", bool, None, "by default as the folder says"),
        *(flag for flag in flags_of(RuntimeConfig) if flag.name in ("device", "float32_linear")),
        Flag("--amp --bf16", bool, None, "compute in bfloat16; by default on GPUs that have it"),
        Flag("--n-best-size", positive_int, 5, "results to show"),
        Flag(
            "--max-seq-length",
            bounded_int(8, MAX_LENGTH),
            None,
            f"maximum tokens of question and window together, by default "
            f"{SquadOptions.max_seq_length}; or of a text, which is cut, by default as in its "
            "training, else as many as the model has positions",
        ),
    ),
    "a question about a passage (a model of run_squad.py)": (
        Flag("--question", str, None, "the question", ("--context",)),
        Flag("--context", str, None, "the passage", ("--question",)),
        *(
            flag
            for flag in flags_of(SquadOptions)
            if flag.name in ("doc_stride", "max_answer_length")
        ),
        Flag(
            "--version-2-with-negative --can-give-negative-answer",
            bool,
            False,
            "there may be no answer",
        ),
    ),
    "a text (a model of run_glue.py or run_ner.py)": (
        Flag("--text", str, None, "the text", excludes=("--question", "--fill-mask")),
        Flag("--text-pair", str, None, "the second text, for a model of pairs", ("--text",)),
    ),
    "masked words (a model of run_pretraining.py)": (
        Flag(
            "--fill-mask",
            str,
            None,
            "a text with one or more [MASK], or the tokenizer's own name of it",
            excludes=("--question",),
            options={"metavar": "TEXT"},
        ),
    ),
    "a whole file: .csv, .tsv, .jsonl or .parquet, also compressed": (
        Flag(
            "--input",
            optional_path,
            None,
            "file to predict",
            ("--output", "--text-column or --question-column"),
            ("--text", "--question", "--fill-mask"),
        ),
        *(flag for flag in flags_of(NumberReadingOptions) if flag.name != "skip_bad"),
        Flag(
            "--output",
            optional_path,
            None,
            "file for the input's columns and the predictions",
            ("--input",),
        ),
        Flag(
            "--text-column",
            str,
            None,
            "column of the text, or of texts with [MASK]",
            ("--input",),
            ("--question-column",),
        ),
        Flag(
            "--pair-column",
            str,
            None,
            "column of the second text, for a model of pairs",
            ("--text-column", "--input"),
        ),
        Flag(
            "--question-column",
            str,
            None,
            "column of the question",
            ("--input", "--context-column"),
        ),
        Flag("--context-column", str, None, "column of the passage", ("--question-column",)),
        Flag(
            "--embed",
            bool,
            False,
            "write sentence embeddings, as the folder's sentence-transformers files say",
            ("--text-column",),
        ),
        Flag(
            "--prompt-name",
            str,
            None,
            "put the folder's prompt of this name, such as query, before the texts",
            ("--embed",),
        ),
        Flag(
            "--batch-size --predict-batch-size",
            positive_int,
            32,
            "sequences per forward pass",
            ("--input",),
        ),
    ),
}
