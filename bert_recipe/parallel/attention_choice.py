"""What computes attention on GPUs: that of --attention, or torch's operators. To add one, write a
class with the members of `ChosenAttention` and add it to `CHOICES` and `config.ATTENTIONS`.
"""

from importlib.util import find_spec
from pkgutil import resolve_name
from typing import ClassVar, Protocol

import torch

from bert_recipe.config import RunConfig
from bert_recipe.model.attention import (
    IMPLEMENTATIONS,
    FlashAttention,
    PreparedAttention,
    flash_supports,
)
from bert_recipe.model.encoders.base import EncoderModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.utils.errors import UserError, one_line

# By name, MODULE:CLASS, which is imported only if it is chosen.
CHOICES = {
    "triton": "bert_recipe.experiments.triton_attention:TritonAttention",
    "flash-attn-4": "bert_recipe.parallel.attention_choice:FlashAttention4",
}


class ChosenAttention(PreparedAttention, Protocol):
    """A PreparedAttention that --attention names.

    gpus: the generations that it needs, in words.
    head_sizes: numbers of elements that a head may have.
    """

    gpus: ClassVar[str]
    head_sizes: ClassVar[tuple[int, ...]]

    @staticmethod
    def supports_gpu(capability: tuple[int, int]) -> bool:
        """Whether it runs on a GPU of this compute capability."""

    @staticmethod
    def check_run(config: RunConfig) -> None:
        """Raises UserError if the run on a GPU or the installed packages do not fit."""

    @staticmethod
    def check_model(config: ModelConfig) -> None:
        """Raises UserError if the model does not fit; `head_sizes` are checked besides."""

    @staticmethod
    def activate() -> None:
        """Called once before the model is computed."""


def load_attention(name: str) -> type[ChosenAttention]:
    """Imports the attention `name` of `CHOICES` and enters it in attention.IMPLEMENTATIONS."""
    attention = resolve_name(CHOICES[name])
    IMPLEMENTATIONS[name] = attention
    return attention


def check_attention_flag(config: RunConfig, device: torch.device) -> None:
    """Raises UserError if the run cannot use --attention; see also `check_attention`."""
    name = config.parallel.attention
    if name == "auto":
        return
    if device.type != "cuda":
        raise UserError(f"--attention {name} is for GPUs; this run is on the CPU: leave it out")
    load_attention(name).check_run(config)


def check_attention(name: str, config: ModelConfig, capability: tuple[int, int]) -> None:
    """Raises UserError if the GPU or the model does not support the attention `name`."""
    attention = load_attention(name)
    attention.check_model(config)
    if not attention.supports_gpu(capability):
        raise UserError(
            f"--attention {name} needs a GPU of the generation {attention.gpus}; this one has "
            f"compute capability {capability[0]}.{capability[1]}: leave the flag out"
        )
    head_size = config.hidden_size // config.num_attention_heads
    if head_size not in attention.head_sizes:
        raise UserError(
            f"--attention {name} supports heads of {', '.join(map(str, attention.head_sizes))} "
            f"elements; this model's have {head_size}: leave the flag out"
        )


def choose_attention(encoder: EncoderModel, device: torch.device, name: str = "auto") -> None:
    """The attention of --attention on a GPU; with `auto`, another one on those without flash
    attention for this encoder; otherwise it chooses by device and type. Raises UserError if `name`
    does not support the encoder.
    """
    capability = torch.cuda.get_device_capability(device)
    if name != "auto":
        check_attention(name, encoder.config, capability)
        load_attention(name).activate()
        encoder.attention_implementation = name
        return
    head_size = encoder.config.hidden_size // encoder.config.num_attention_heads
    if not flash_supports(head_size, capability):
        # The backward pass of the efficient one adds in no fixed order.
        is_padded = head_size % 8 or torch.are_deterministic_algorithms_enabled()
        encoder.attention_implementation = "padded" if is_padded else "efficient"


class FlashAttention4(FlashAttention):
    """The package flash-attn-4, which overrides the operator that FlashAttention calls."""

    gpus = "Hopper or Blackwell"
    head_sizes = (64, 128)

    @staticmethod
    def supports_gpu(capability: tuple[int, int]) -> bool:
        return capability[0] in (9, 10)

    @staticmethod
    def check_run(config: RunConfig) -> None:
        if not (config.precision.amp or config.precision.pure_fp16):
            raise UserError("--attention flash-attn-4 computes in 16 bits: add --amp")
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            raise UserError(
                "--attention flash-attn-4 needs the package: run `pip install flash-attn-4`"
            )
        if torch.__version__ < "2.14":  # compares versions
            raise UserError(
                f"--attention flash-attn-4 needs PyTorch 2.14; this is {torch.__version__}: leave "
                f"it out"
            )

    @staticmethod
    def check_model(config: ModelConfig) -> None:
        if config.attention_dropout > 0:
            raise UserError(
                f"--attention flash-attn-4 has no dropout, and this model has an attention dropout "
                f"of {config.attention_dropout:g}: give --dropout 0, or leave --attention out"
            )

    @staticmethod
    def activate() -> None:
        from torch.nn import attention

        try:
            attention.activate_flash_attention_impl("FA4")
        except Exception as error:  # of a package that was built for other versions
            raise UserError(
                f"--attention flash-attn-4: the package does not work here "
                f"({one_line(str(error))}): install it for this PyTorch and CUDA, or leave the "
                f"flag out"
            ) from error
