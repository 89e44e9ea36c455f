"""Linear layers for inference on a CPU."""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`linear` for bfloat16 inference on a CPU: oneDNN packs the weight once instead of in every
    call.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        # 128 is the expected number of rows; any number works.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 128)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.dtype = linear.weight.dtype

    def forward(self, hidden_TE: Tensor) -> Tensor:
        hidden_TE = hidden_TE.to(self.dtype)
        return torch.ops.mkldnn._linear_pointwise(hidden_TE, self.weight, self.bias, "none", [], "")

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this machine has the operators, which torch.compile uses; torch 2.11's round
        differently.
        """
        return (
            torch.__version__ >= "2.13"  # compares versions
            and (weight.dtype, weight.device.type) == (torch.bfloat16, "cpu")
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
