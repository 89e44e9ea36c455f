"""Linear layers for inference on a CPU."""

import torch
from torch import Tensor, nn

from bert_recipe.model.kernels.linear import product, uses_onednn


class PackedLinear(nn.Module):
    """`linear` for inference on a CPU, in bfloat16, or in float32 where oneDNN computes it: oneDNN
    packs the weight once instead of in every call.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        # 128 is the expected number of rows; any number works.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 128)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.dtype = linear.weight.dtype

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return product(hidden_TE.to(self.dtype), self.weight, self.bias)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this machine has the operators, which torch.compile uses; torch 2.11's round
        differently.
        """
        if torch.__version__ < "2.13" or not weight.is_cpu:  # compares versions
            return False
        if weight.dtype == torch.float32:
            return uses_onednn()
        return (
            weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
