#!/usr/bin/env python3
"""Writes a model folder as ONNX, for onnxruntime, and with --int8 as 8-bit integers.

    python3 scripts/export_onnx.py --init-checkpoint FOLDER --output-dir onnx/

Classes, also on a frozen encoder, tags, answers, and sentence embeddings with their pooling. The
result is compared with the model; the program fails if they differ. Needs: pip install transformers
onnx onnxscript onnxruntime
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib
import logging
import shutil
import warnings
from collections.abc import Sequence
from typing import Any

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE, read_temperature
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import (
    CLASSIFIER_MODULES,
    LENGTH_FILE,
    MODULES_FILE,
    PROMPTS_FILE,
    EmbeddingSettings,
)
from bert_recipe.tasks.classification.frozen import EPSILON, FrozenEncoder
from bert_recipe.tokenization.files import TOKENIZER_FILES
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag
from bert_recipe.utils.files import atomic_folder
from bert_recipe.utils.progress import print_line

TOLERANCE = 1e-4  # of logits and of embeddings; of numbers above 1, of the largest
SAMPLES = ["A text.", "This text is longer: it has several words, and so there is padding."]
# They describe the inside of the exporter. Those of transformers, such as weights that a folder
# lacks, are shown.
SILENCED = ("", "torch.onnx", "torch.utils._pytree", "torchao")
PACKAGES = ("transformers", "onnx", "onnxscript", "onnxruntime")
COPIED = ("config.json", *TOKENIZER_FILES, "README.md")
# What is done outside of the model, and is not in the ONNX file.
SETTINGS = (PROMPTS_FILE, LENGTH_FILE, CALIBRATION_FILE)
FLAGS = (
    Flag("--init-checkpoint", Path, REQUIRED, "model folder, or folder of a run"),
    Flag("--output-dir", Path, REQUIRED, "folder to write; new, or empty"),
    Flag("--int8", bool, False, "also write model_int8.onnx, with weights of 8 bits"),
)


def silence_exporter() -> None:
    """Leaves only errors of the loggers SILENCED, and no warnings and progress bars."""
    import torch  # noqa: F401 # when it is imported, it sets the levels of its loggers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    for name in SILENCED:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    set_verbosity_error()
    disable_progress_bar()


def wrapped_model(source: ModelFolder) -> Any:
    """transformers' model in `source`, as a module with one output: logits or embeddings. Raises
    UserError if transformers has no such model but code of the folder's publisher, which is not
    run.
    """
    import torch
    import transformers

    from bert_recipe.checkpoint.weights import CLASSIFIERS

    class Wrapped(torch.nn.Module):
        def __init__(
            self,
            model: torch.nn.Module,
            settings: EmbeddingSettings | None,
            frozen: FrozenEncoder | None = None,
        ):
            super().__init__()
            self.model = model.eval()
            self.settings = settings
            self.gives_logits = settings is None or frozen is not None
            if frozen is not None:
                self.weight_CE = torch.tensor(frozen.weight_CF)
                self.bias_C = torch.tensor(frozen.bias_C)

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            token_type_ids: torch.Tensor | None = None,
        ) -> torch.Tensor:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
            if token_type_ids is not None:
                inputs["token_type_ids"] = token_type_ids
            output = self.model(**inputs)
            if self.settings is None:
                answers = getattr(output, "start_logits", None)
                if answers is None:
                    return output.logits
                return torch.stack([output.start_logits, output.end_logits], dim=2)
            vectors = output.last_hidden_state[:, 0]
            if self.settings.pooling == "mean":
                mask = attention_mask.unsqueeze(2).to(output.last_hidden_state.dtype)
                vectors = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
            if self.gives_logits:
                vectors = torch.nn.functional.layer_norm(vectors, vectors.shape[1:], eps=EPSILON)
                return torch.nn.functional.linear(vectors, self.weight_CE, self.bias_C)
            return torch.nn.functional.normalize(vectors) if self.settings.normalize else vectors

    folder, architecture = source.path, source.architecture or ""
    if source.config.model_type not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"{folder} has a {source.config.model_type} model, which the export needs transformers "
            f"for, and transformers {transformers.__version__} lacks: use a model of another "
            f"architecture"
        )
    is_classifier = architecture.endswith(CLASSIFIERS)
    if not is_classifier and (folder / MODULES_FILE).is_file():
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
        frozen = FrozenEncoder.read(folder)
        if frozen is not None and frozen.compares:
            raise UserError(
                f"{folder} compares the vectors of two texts, which is not exported: export the "
                f"encoder that it was fitted to, for the vectors, or fine-tune without "
                f"--frozen-encoder"
            )
        settings = EmbeddingSettings.read(folder) if frozen is None else frozen.settings
        return Wrapped(model, settings, frozen)
    if not is_classifier:
        raise UserError(
            f"{folder} is a {architecture or 'model without a class'}: give a fine-tuned model"
        )
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    return Wrapped(model, None)


def export(source: ModelFolder, target: Path) -> None:
    """Writes `target`/model.onnx, whose batch and length are free."""
    import torch
    import transformers

    model = wrapped_model(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path)
    batch = tokenizer(SAMPLES, padding=True, return_tensors="pt")
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
    inputs = tuple(batch[name] for name in names)
    with torch.no_grad():
        expected = model(*inputs)
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=8192)}
        torch.onnx.export(
            model,
            inputs,
            target / "model.onnx",
            input_names=names,
            output_names=["logits" if model.gives_logits else "embeddings"],
            dynamic_shapes=(axes,) * len(inputs),
            dynamo=True,
            verbose=False,
            external_data=False,
        )
    difference = largest_difference(target / "model.onnx", batch, expected.numpy())
    print_line(f"largest difference of {len(SAMPLES)} texts from the model: {difference:.1e}")
    if not difference < TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(f"the exported model differs by {difference:g}: see the versions above")


def largest_difference(path: Path, batch: Any, expected: Any) -> float:
    """Of the output of the file for `batch` from `expected`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {tensor.name: batch[tensor.name].numpy() for tensor in session.get_inputs()}
    (outputs,) = session.run(None, feed)
    return float(abs(outputs - expected).max())


def outside_of_the_file(folder: Path) -> list[str]:
    """What the user of the ONNX file has to do, because the model of `folder` does it, too."""
    advice = []
    if (folder / MODULES_FILE).is_file():
        settings = EmbeddingSettings.read(folder, CLASSIFIER_MODULES)
        prompts = {name: text for name, text in settings.prompts.items() if text}
        if prompts:
            shown = ", ".join(f"{name} {text!r}" for name, text in prompts.items())
            advice.append(f"put the prompts before the texts ({shown})")
        if settings.do_lower_case:
            advice.append("lower-case the texts")
    temperature = read_temperature(folder)
    if temperature != 1:
        advice.append(f"divide the logits by {temperature:.4g}, of {CALIBRATION_FILE}")
    return advice


def quantize(target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = target / "model_int8.onnx"
    quantize_dynamic(target / "model.onnx", path, per_channel=True, weight_type=QuantType.QInt8)
    sizes = [(target / name).stat().st_size for name in ("model.onnx", path.name)]
    print_line(f"{path.name}: {sizes[1] / 1e6:.1f} MB of {sizes[0] / 1e6:.1f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("model", FLAGS)
    args = parser.parse_args(argv)
    parser.check_flags(args)
    if args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise UserError(f"{args.output_dir} is not empty: choose another --output-dir")
    source = ModelFolder.find(args.init_checkpoint)
    folder = source.path
    for path in (folder, args.output_dir.resolve()):
        str(path).encode()  # other libraries take no other names; `run_main` says so
    for package in PACKAGES:  # before the work: torch.onnx ends with a traceback of its own
        importlib.import_module(package)
    silence_exporter()
    with atomic_folder(args.output_dir.resolve()) as target:
        export(source, target)
        if args.int8:
            quantize(target)
        for name in (*COPIED, *SETTINGS):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
    print_line(f"wrote {args.output_dir}")
    for advice in outside_of_the_file(folder):
        print_line(f"note: {advice}, which the ONNX file does not do")


if __name__ == "__main__":
    run_main(main)
