#!/usr/bin/env python3
"""Texts per second of inference, beside sentence-transformers and transformers' pipeline.

    export OMP_NUM_THREADS=1
    python3 benchmarks/inference_speed.py --init-checkpoint FOLDER --input TEXTS --task classes
    python3 benchmarks/inference_speed.py --init-checkpoint FOLDER --input TEXTS --batch-size 1
    python3 benchmarks/inference_speed.py --init-checkpoint FOLDER --input TEXTS --onnx

--task embedding: sentence vectors, beside SentenceTransformer.encode. --task classes: classes of a
text with their probabilities, beside pipeline("text-classification"); a folder without such a head
gets a random one of two classes. The texts come from long to short, as encode sorts them, so that
batches have little filler. Both take turns, in float32, or with --amp in bfloat16, also the peer's
weights, with up to 256 tokens of each text. Everything from the text to the Python values is timed.
A batch size of 1 gives the texts one by one, as a service gets them. Both run torch without
compilation. --onnx, also beside --amp, compares the files of scripts/export_onnx.py in onnxruntime,
in float32 and with weights of 8 bits, without two of its fusions, which are slower than what they
replace; OpenVINO is not compared. --pairs, the dev.tsv of STS-B or a table with its columns, adds
Spearman's correlation of the cosines of each implementation's vectors with the scores. Needs
sentence-transformers, and with --onnx what scripts/export_onnx.py needs.
"""

import sys
import tempfile
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import inference
from benchmarks.common.results import (
    CPU,
    benchmark_parser,
    format_quartiles,
    paired_ratio,
    quartiles,
    write_result,
)
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.worker import THIS_PROJECT, Worker, measure_in_turns
from bert_recipe.utils.command_line import REQUIRED, Arguments, Flag, positive_int
from bert_recipe.utils.device import set_num_threads
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.tables import read_texts
from scripts import export_onnx

EMBEDDING, CLASSES = "embedding", "classes"
PAIR_COLUMNS = ("sentence1", "sentence2")
MAX_TOKENS = 256  # of a text
PEERS = {EMBEDDING: "sentence-transformers", CLASSES: "transformers"}
ONNX_FILES = {"onnxruntime": "model.onnx", "onnxruntime, int8": "model_int8.onnx"}
# On an AMD EPYC with AVX-512, onnxruntime without them is 1.14 times as fast in float32 and 1.25 to
# 1.4 times with int8 weights, MiniLM in batches of 32.
SLOW_FUSIONS = ["SkipLayerNormFusion", "BiasGeluFusion"]
FLAGS = (
    Flag("--init-checkpoint", Path, REQUIRED, "folder of a model"),
    Flag("--input", Path, REQUIRED, 'a table with the column "text"'),
    Flag("--task", (EMBEDDING, CLASSES), EMBEDDING, "what is predicted"),
    Flag("--batch-size", positive_int, 32, "texts per batch; 1: one by one"),
    Flag("--texts", positive_int, 256, "texts per turn, the first of the file"),
    Flag("--rounds", positive_int, 7, "turns of each implementation"),
    Flag("--amp", bool, False, "bfloat16 instead of float32"),
    Flag("--onnx", bool, False, "also onnxruntime, in float32 and with int8 weights"),
    Flag("--pairs", Path, None, "table of scored pairs, to compare embeddings with"),
)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    return benchmark_parser(__doc__, *FLAGS).parse_args(argv)


def dtype_of(args: Arguments) -> torch.dtype:
    """The type of the peer's weights."""
    return torch.bfloat16 if args.amp else torch.float32


class Implementation(ABC):
    """Predicts lists of texts."""

    def __init__(self, args: Arguments, folder: Path, texts: list[str]):
        self.args, self.folder = args, folder
        if args.batch_size == 1:
            self.calls = [[text] for text in texts]
        else:
            self.calls = [texts]

    def settings(self) -> dict[str, Any]:
        weights = "bfloat16" if self.args.amp else "float32"
        return {"batch": self.args.batch_size, "weights": weights, "compiled": False}

    @abstractmethod
    def predict(self, texts: list[str]) -> list:
        """What is predicted for each text, as Python values."""

    def vectors(self, texts: list[str]) -> list:
        """The embeddings of the texts."""
        return self.predict(texts)

    def spearman(self, pairs: Path) -> float:
        """Correlation of the cosines of the table's pairs with their scores."""
        from scipy import stats

        rows = [row for _, row in read_texts(pairs, PAIR_COLUMNS, ["score"])]
        first, second = (
            torch.tensor(self.vectors([row[name] for row in rows])) for name in PAIR_COLUMNS
        )
        cosines = torch.cosine_similarity(first, second).tolist()
        return float(stats.spearmanr(cosines, [float(row["score"]) for row in rows]).statistic)

    def turn(self, _number: int) -> float:
        """Texts per second of processor time."""
        started = time.process_time()
        predicted = [prediction for texts in self.calls for prediction in self.predict(texts)]
        return len(predicted) / (time.process_time() - started)


class ThisProject(Implementation):
    """inference.py's predictions."""

    def __init__(self, args: Arguments, folder: Path, texts: list[str]):
        super().__init__(args, folder, texts)
        flags = {
            "init-checkpoint": folder,
            "batch-size": args.batch_size,
            "max-seq-length": MAX_TOKENS,
            "amp": str(args.amp).lower(),
            "device": "cpu",
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        words += ["--embed"] if args.task == EMBEDDING else []
        words += ["--input=texts.jsonl", "--output=predicted.jsonl", "--text-column=text"]
        self.model = inference.open_model(inference.parse_arguments(words))

    def predict(self, texts: list[str]) -> list:
        places = [str(number) for number in range(len(texts))]
        rows = self.model.predictor.rows(places, [{"text": text} for text in texts])
        return self.model.predict(rows)

    def vectors(self, texts: list[str]) -> list:
        return [prediction.columns["embedding"] for prediction in self.predict(texts)]


class SentenceTransformers(Implementation):
    def __init__(self, args: Arguments, folder: Path, texts: list[str]):
        super().__init__(args, folder, texts)
        silence_imports()
        from sentence_transformers import SentenceTransformer

        options = {"dtype": dtype_of(args)}
        self.model = SentenceTransformer(str(folder), device="cpu", model_kwargs=options)
        self.model.max_seq_length = MAX_TOKENS

    def settings(self) -> dict[str, Any]:
        config = self.model[0].auto_model.config
        return super().settings() | {
            "version": version("sentence-transformers"),
            "attention": config._attn_implementation,
        }

    def predict(self, texts: list[str]) -> list:
        size = self.args.batch_size
        return self.model.encode(texts, batch_size=size, show_progress_bar=False).tolist()


class Pipeline(Implementation):
    def __init__(self, args: Arguments, folder: Path, texts: list[str]):
        super().__init__(args, folder, texts)
        silence_imports()
        from transformers import pipeline

        self.pipeline = pipeline(
            "text-classification",
            model=str(folder),
            tokenizer=str(folder),
            device="cpu",
            dtype=dtype_of(args),
        )

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "attention": self.pipeline.model.config._attn_implementation,
        }

    def predict(self, texts: list[str]) -> list:
        options = {"truncation": True, "max_length": MAX_TOKENS, "top_k": None}
        with torch.inference_mode():
            if self.args.batch_size == 1:  # a list, even of one text, would make a DataLoader
                return [self.pipeline(text, **options) for text in texts]
            return self.pipeline(texts, batch_size=self.args.batch_size, **options)


class OnnxRuntime(Implementation):
    """A file of scripts/export_onnx.py, with transformers' tokenizer."""

    def __init__(self, args: Arguments, folder: Path, texts: list[str], name: str):
        super().__init__(args, folder, texts)
        silence_imports()
        import onnxruntime
        from transformers import AutoTokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(
            folder / name, options, providers=providers, disabled_optimizers=SLOW_FUSIONS
        )
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def settings(self) -> dict[str, Any]:
        return {
            "batch": self.args.batch_size,
            "version": version("onnxruntime"),
            "disabled_optimizers": SLOW_FUSIONS,
        }

    def predict(self, texts: list[str]) -> list:
        size = self.args.batch_size
        outputs = []
        for start in range(0, len(texts), size):
            batch = self.tokenizer(
                texts[start : start + size],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="np",
            )
            (output,) = self.session.run(None, {name: batch[name] for name in self.inputs})
            if self.args.task == CLASSES:
                output = torch.from_numpy(output).softmax(-1)
            outputs += output.tolist()
        return outputs


def with_classes(folder: Path, target: Path) -> Path:
    """`folder` if it classifies texts, else a copy in `target` with a random head."""
    silence_imports()
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    names = AutoConfig.from_pretrained(folder).architectures or [""]
    if names[0].endswith("ForSequenceClassification"):
        return folder
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    set_num_threads()  # as the workers do, for machine_info
    texts = [row["text"] for _, row in read_texts(args.input, ["text"])][: args.texts]
    texts = sorted(texts, key=len, reverse=True)
    with tempfile.TemporaryDirectory(prefix="inference_speed_") as scratch:
        folder, peer = args.init_checkpoint, PEERS[args.task]
        if args.task == CLASSES:
            folder = with_classes(folder, Path(scratch))
        make_peer = Pipeline if args.task == CLASSES else SentenceTransformers
        workers = {
            THIS_PROJECT: Worker(ThisProject, (args, folder, texts)),
            peer: Worker(make_peer, (args, folder, texts)),
        }
        if args.onnx:
            exported = Path(scratch) / "onnx"
            words = [f"--init-checkpoint={folder}", f"--output-dir={exported}", "--int8"]
            export_onnx.main(words)
            for name, file in ONNX_FILES.items():
                workers[name] = Worker(OnnxRuntime, (args, exported, texts, file))
        scores = {}
        if args.pairs is not None:
            scores = {name: worker.call("spearman", args.pairs) for name, worker in workers.items()}
        rates, settings, _ = measure_in_turns(workers, args.rounds)
    our_rates = rates[THIS_PROJECT]
    peers = {name: peer_rates for name, peer_rates in rates.items() if name != THIS_PROJECT}
    ratios = {name: paired_ratio(our_rates, peer_rates) for name, peer_rates in peers.items()}
    for name, values in rates.items():
        print_line(f"{name}: {format_quartiles(quartiles(values), ',.1f')} texts per CPU second")
    for name, score in scores.items():
        print_line(f"{name}: Spearman correlation {score:.4f}")
    for name, ratio in ratios.items():
        print_line(f"{THIS_PROJECT} / {name}: {format_quartiles(ratio)}")
    shown = ("task", "batch_size", "amp", "texts", "rounds")
    arguments = {name: vars(args)[name] for name in shown}
    characters = quartiles([len(text) for text in texts])
    result = {
        "texts": "from long to short",
        "arguments": arguments | {"input": args.input.name, "characters_of_a_text": characters},
        "settings": settings,
        "texts_per_cpu_second": {name: quartiles(values) for name, values in rates.items()},
        "speedup": ratios,
    }
    if scores:
        result |= {"pairs": args.pairs.name, "spearman": scores}
    precision = "bf16" if args.amp else "fp32"
    name = f"inference_speed-{args.task}-{args.input.stem}-{args.batch_size}-{precision}"
    write_result(args.output, name, CPU, result)


if __name__ == "__main__":
    run_main(main)
