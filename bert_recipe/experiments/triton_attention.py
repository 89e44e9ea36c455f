"""--attention triton: see triton_kernels.py. Importing this module does not need Triton."""

from importlib.util import find_spec

from torch import Tensor

from bert_recipe.config import RunConfig
from bert_recipe.model.attention import StreamLayout
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.utils.errors import UserError

MAX_LENGTH = 512  # see GROUPS in triton_kernels.py


def too_long(length: int) -> UserError:
    return UserError(
        f"--attention triton is for sequences of up to {MAX_LENGTH} tokens; this run's have up to "
        f"{length}: leave it out"
    )


class TritonAttention:
    """A kernel for sequences of up to 512 tokens on GPUs. Unlike flash attention's, its gradient
    has the same bits in every run. See parallel.attention_choice.ChosenAttention.
    """

    gpus = "Ampere or newer"
    head_sizes = (16, 32, 64, 128)

    def __init__(self, layout: StreamLayout):
        self.layout = layout

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        from bert_recipe.experiments.triton_kernels import attend  # torch for CPUs brings no Triton

        cu_seqlens, max_seqlen, _, *options, _ = self.layout
        if max_seqlen > MAX_LENGTH:  # of shards, without --max-seq-length
            raise too_long(max_seqlen)
        return attend(qkv_T3HD, cu_seqlens, max_seqlen, *options, dropout_prob)

    @staticmethod
    def supports_gpu(capability: tuple[int, int]) -> bool:
        return capability >= (8, 0)

    @staticmethod
    def check_run(config: RunConfig) -> None:
        length = config.loader.max_seq_length
        if length > MAX_LENGTH:
            raise too_long(length)
        if find_spec("triton") is None:
            raise UserError("--attention triton needs Triton: run `pip install triton`")

    @staticmethod
    def check_model(config: ModelConfig) -> None:
        """All models fit."""

    @staticmethod
    def activate() -> None:
        """Nothing to do."""
