"""The flags of inference.py, by what they are for."""

from run_config import MAX_LENGTH, RuntimeConfig
from tasks.reading import one_character, text_encoding
from tasks.squad_file import SquadOptions
from utils.command_line import (
    REQUIRED,
    Flag,
    bounded_int,
    flags_of,
    fraction_below_one,
    input_path,
    optional_path,
    positive_int,
    required_input,
)

FLAGS = {
    "model": (
        Flag(
            "--init-checkpoint --from-pretrained-params",
            required_input,
            REQUIRED,
            "a checkpoint or Hugging Face model folder, or a folder of steps",
        ),
        Flag(
            "--config-file",
            input_path,
            None,
            "the architecture; by default the folder's, with its vocabulary",
        ),
        Flag("--vocab-file", input_path, None, "the vocabulary; by default the folder's"),
        Flag("--do-lower-case", bool, None, "by default as the folder says"),
        *(flag for flag in flags_of(RuntimeConfig) if flag.name == "device"),
        Flag("--amp --bf16", bool, None, "compute in bfloat16; by default on GPUs that have it"),
        Flag("--n-best-size", positive_int, 5, "results to show"),
        Flag(
            "--max-seq-length",
            bounded_int(8, MAX_LENGTH),
            None,
            f"maximum tokens of question and window together, by default "
            f"{SquadOptions.max_seq_length}; or of a text, "
            "by default as many as the model has positions",
        ),
        Flag("--truncate", bool, False, "cut texts that are too long, instead of an error"),
    ),
    "a question about a passage (a model of run_squad.py)": (
        Flag("--question", str, None, "the question", ("--context or --context-file",)),
        Flag("--context", str, None, "the passage", excludes=("--context-file",)),
        Flag("--context-file", input_path, None, "a text file with the passage"),
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
    "a text (a model of run_glue.py)": (
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
            input_path,
            None,
            "file to predict",
            ("--output", "--text-column or --question-column"),
            ("--text", "--question", "--context", "--context-file", "--fill-mask"),
        ),
        Flag(
            "--delimiter",
            one_character,
            None,
            "character between the columns of the files to read, or tab",
            ("--input or --search",),
        ),
        Flag(
            "--encoding",
            text_encoding,
            None,
            "encoding of the files to read: cp1252, ...",
            ("--input or --search",),
        ),
        Flag(
            "--output",
            optional_path,
            None,
            "file for the input's columns and the predictions",
            ("--input or --queries or --mine-negatives",),
        ),
        Flag(
            "--text-column",
            str,
            None,
            "column of the text, or of texts with [MASK]",
            ("--input or --search",),
            ("--question-column",),
        ),
        Flag(
            "--pair-column",
            str,
            None,
            "column of the second text, for a model of pairs",
            ("--text-column", "--input or --mine-negatives"),
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
            ("--input or --search or --search-benchmark",),
        ),
    ),
    "search with a model of sentence embeddings": (
        Flag(
            "--search",
            input_path,
            None,
            "file with texts in --text-column, of which to find those nearest to --text, to each "
            "line that is typed, or to --queries; their vectors are kept beside it",
            ("--text-column",),
            ("--input",),
        ),
        Flag(
            "--queries",
            input_path,
            None,
            "file with queries in --query-column; --output gets the nearest texts of each",
            ("--search", "--query-column", "--output"),
            ("--text", "--mine-negatives"),
        ),
        Flag(
            "--query-column", str, None, "column of the query", ("--queries or --mine-negatives",)
        ),
        Flag(
            "--mine-negatives",
            input_path,
            None,
            "file with pairs of a query and its answer, in --query-column and --pair-column: "
            "--output gets them with texts of --search that are similar, but no answer, for "
            "run_glue.py --negative-columns, and with --rerank the scores of all of them",
            ("--search", "--query-column", "--pair-column", "--output"),
            ("--text", "--n-best-size", "--rerank-top"),
        ),
        Flag("--num-negatives", positive_int, 4, "negatives of a pair", ("--mine-negatives",)),
        Flag(
            "--negative-margin",
            fraction_below_one,
            0.05,
            "leave out texts with a cosine above 1 - this share of the answer's",
            ("--mine-negatives",),
        ),
        Flag(
            "--search-benchmark",
            input_path,
            None,
            "folder with corpus, queries and qrels, as BEIR, NanoBEIR and MTEB publish them: "
            "prints the scores of the search",
            excludes=("--search", "--input", "--text", "--text-column", "--n-best-size"),
        ),
        Flag(
            "--rerank",
            input_path,
            None,
            "folder of a cross-encoder, which orders the texts that the search finds",
            ("--search or --search-benchmark",),
        ),
        Flag(
            "--rerank-label",
            str,
            None,
            "class of texts that answer a query, of a --rerank model of classes; by default 1, "
            "true, yes or relevant of two classes",
            ("--rerank",),
        ),
        Flag("--rerank-top", positive_int, 100, "nearest texts that are ordered", ("--rerank",)),
    ),
}
