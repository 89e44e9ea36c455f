#!/usr/bin/env python3
"""How far hidden states and gradients are from transformers', with the same weights.

    python3 benchmarks/exactness.py
    python3 benchmarks/exactness.py --model-folder all-MiniLM-L6-v2

For each model type, transformers draws weights of a model of 4 layers of 256, of BERT-base and of
ModernBERT-base, and saves the folder, from which this project loads them. In float32, without
dropout: this project's stream without padding beside transformers' padded batch, whose padding is
left out of the comparison. --model-folder: a released BERT, of which both are compared with
transformers in float64. Then the products of linear layers beside float64, by each library that
computes them (docs/performance.md).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import modeling
from benchmarks.common.attention_check import relative_error
from benchmarks.common.results import CPU, benchmark_parser, write_result
from bert_recipe.model.kernels.linear import float32_linear, linear, onednn_is_faster
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.command_line import Flag
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.progress import print_line

LENGTHS = (5, 9, 40, 128, 129, 300)
SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Of each family: what the names of transformers' classes and of this project's begin with, and the
# changes of the config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("Bert", "Bert", {**DROPOUT, "pad_token_id": 0}),
    "RoBERTa": ("Roberta", "Roberta", {**DROPOUT, "type_vocab_size": 1}),
    "XLM-RoBERTa": ("XLMRoberta", "Roberta", {**DROPOUT, "type_vocab_size": 1}),
    "DistilBERT": (
        "DistilBert",
        "DistilBert",
        {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0, "hidden_dim": 1024},
    ),
    "ELECTRA": ("Electra", "Electra", {**DROPOUT, "pad_token_id": 0, "embedding_size": 128}),
    "ModernBERT": ("ModernBert", "ModernBert", {"pad_token_id": 1}),
}
BASE = {"vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12}
# Of the sizes of released models.
FAMILIES |= {
    "BERT, 12 x 768": (
        "Bert",
        "Bert",
        {**FAMILIES["BERT"][2], **BASE, "num_hidden_layers": 12, "intermediate_size": 3072},
    ),
    "ModernBERT, 22 x 768": (
        "ModernBert",
        "ModernBert",
        {"pad_token_id": 1, **BASE, "num_hidden_layers": 22, "intermediate_size": 1152},
    ),
}

# Of linear layers: rows, inputs, outputs.
PRODUCTS = ((190, 384, 1536), (3664, 256, 1024), (3664, 768, 768), (3664, 768, 3072))
PRODUCTS += ((3664, 3072, 768), (550, 768, 30528))


def random_batch(vocab_size: int, padding: int) -> tuple[Tensor, Tensor]:
    """Padded tokens, and which are none of the padding."""
    rows = [torch.randint(5, vocab_size, (length,)) for length in LENGTHS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


@torch.no_grad()
def compare_with_float64(folder: Path) -> dict[str, float]:
    """The largest difference of a hidden state from transformers in float64, of both."""
    torch.manual_seed(0)
    theirs = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids, is_real = random_batch(theirs.config.vocab_size, theirs.config.pad_token_id)
    stream, _ = TokenStream.from_padded(input_ids=ids, attention_mask=is_real)
    states = {
        "this project": modeling.BertModel.from_pretrained(folder).eval()(stream).last_hidden_state,
        "transformers": theirs(ids, is_real).last_hidden_state[is_real],
    }
    expected = theirs.double()(ids, is_real).last_hidden_state[is_real]
    return {name: float((state - expected).abs().max()) for name, state in states.items()}


def compare(prefix: str, prefix_here: str, changes: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        **{**SIZES, **changes}, attn_implementation="sdpa"
    )
    theirs = getattr(transformers, f"{prefix}ForMaskedLM")(config).train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = getattr(modeling, f"{prefix_here}ForMaskedLM").from_pretrained(folder).train()

    ids, is_real = random_batch(config.vocab_size, config.pad_token_id)
    stream, _ = TokenStream.from_padded(input_ids=ids, attention_mask=is_real)

    output = theirs(input_ids=ids, attention_mask=is_real, output_hidden_states=True)
    expected = output.hidden_states[-1][is_real]
    states = ours.base_model(stream).last_hidden_state
    largest = float((states - expected).detach().abs().max())
    result = {
        "states": relative_error(states, expected),
        "largest difference of a state": largest,
    }

    weights = torch.randn_like(output.logits[is_real])
    logits = ours(stream).prediction_logits[..., : config.vocab_size]
    (output.logits[is_real] * weights).sum().backward()
    (logits * weights).sum().backward()
    theirs_of = dict(theirs.named_parameters(remove_duplicate=False))
    errors = {
        name: relative_error(p.grad[: len(theirs_of[name])], theirs_of[name].grad)
        for name, p in ours.named_parameters()
        # The gradient of a key's bias is zero but for rounding: it adds the same to all keys.
        if not name.endswith(("key.bias", "k_lin.bias"))
    }
    return result | {"gradients": max(errors.values())}


def linear_errors(shape: tuple[int, int, int], onednn: bool) -> dict[str, float]:
    """The relative errors of a linear layer's output and gradients, in float32."""
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    sizes = (rows, inputs), (outputs, inputs), (outputs,)
    operands = [torch.randn(size) for size in sizes]
    grad = torch.randn(rows, outputs)

    def results(dtype: torch.dtype) -> list[Tensor]:
        cast = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        output = linear(*cast)
        return [output, *torch.autograd.grad(output, cast, grad.to(dtype))]

    with float32_linear(onednn):
        errors = map(relative_error, results(torch.float32), results(torch.float64))
        names = ("output", "gradient of the input", "of the weight", "of the bias")
        return dict(zip(names, errors, strict=True))


def main(argv: list[str] | None = None) -> None:
    flag = Flag("--model-folder", Path, None, "a released BERT, beside float64")
    args = benchmark_parser(__doc__, flag).parse_args(argv)
    errors = {family: compare(*arguments) for family, arguments in FAMILIES.items()}
    for family, values in errors.items():
        figures = (f"{name} {value:.1e}" for name, value in values.items())
        print_line(", ".join([family, *figures]))
    result: dict[str, Any] = {"relative errors": errors}
    if args.model_folder:
        result["model"] = args.model_folder.name
        result["largest difference from float64"] = compare_with_float64(args.model_folder)
        print_line(f"{args.model_folder.name}: {result['largest difference from float64']}")
    if onednn_is_faster():
        result["linear layers, relative errors"] = {
            "rows {}, inputs {}, outputs {}".format(*shape): {
                "oneDNN": linear_errors(shape, True),
                "MKL": linear_errors(shape, False),
            }
            for shape in PRODUCTS
        }
        for shape, values in result["linear layers, relative errors"].items():
            print_line(f"{shape}: {values}")
    write_result(args.output, "exactness", CPU, result)


if __name__ == "__main__":
    run_main(main)
