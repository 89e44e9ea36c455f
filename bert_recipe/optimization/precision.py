"""Mixed precision: the types of a run, loss scaling, and float32 master weights."""

import contextlib
import platform
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bert_recipe.config import AMP_DTYPES, PrecisionConfig
from bert_recipe.utils.device import cpu_maker
from bert_recipe.utils.errors import UserError

DTYPES = {name: getattr(torch, name) for name in AMP_DTYPES}


@dataclass(frozen=True)
class Precision:
    """dtype: type of matrix products. By default, weights are float32 and autocast casts them. With
    `pure`, the model's weights are in `dtype` and the optimizer updates float32 master weights.
    loss_scale, dynamic_loss_scale: see LossScale.
    """

    dtype: torch.dtype = torch.float32
    pure: bool = False
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False

    @property
    def autocast(self) -> bool:
        return self.dtype != torch.float32 and not self.pure

    @property
    def needs_loss_scale(self) -> bool:
        return self.dtype == torch.float16

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context manager of a forward pass."""
        return (
            torch.autocast(device.type, self.dtype) if self.autocast else contextlib.nullcontext()
        )


def has_float16(device: torch.device) -> bool:
    # torch 2.11 does not tell.
    return device.type == "cuda" or getattr(torch.cpu, "_is_avx512_fp16_supported", lambda: False)()


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are faster than float32 on `device`. A rule, not a
    measurement. On processors without bfloat16 instructions, oneDNN converts to float32; on x86
    without AVX-512, torch uses slow scalar code. Those of AVX512-BF16 compute twice as fast as
    float32 on AMD's processors, and half as fast on Intel's, where AMX is the fast way.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not is_x86 or torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and cpu_maker() != "GenuineIntel"


def select_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """The precision of a run. Raises UserError if the device lacks it."""
    if config.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UserError("--tf32: this device has no TF32: leave it out")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    if not (config.amp or config.pure_fp16):
        return Precision()
    dtype = DTYPES[config.amp_dtype]
    if dtype == torch.float16 and not has_float16(device):
        raise UserError(
            "--amp-dtype float16: this CPU computes no float16: use --amp-dtype bfloat16, or a GPU"
        )
    if dtype == torch.bfloat16 and device.type == "cuda" and not has_bfloat16(device):
        raise UserError(
            "--amp-dtype bfloat16: this GPU computes no bfloat16: use --amp-dtype float16"
        )
    precision = Precision(dtype, config.pure_fp16)
    if precision.needs_loss_scale:
        scale, is_dynamic = config.loss_scale, config.dynamic_loss_scale
        precision = replace(precision, loss_scale=scale, dynamic_loss_scale=is_dynamic)
    return precision


def optimizer_product_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The type of an optimizer's matrix products on `device`: float32 in float32 runs; otherwise
    bfloat16 where it is faster.
    """
    if device.type == "cuda":
        is_fast = precision.dtype != torch.float32
    else:
        is_fast = precision.dtype == torch.bfloat16 and has_bfloat16(device)
    return torch.bfloat16 if is_fast else torch.float32


def slow_bfloat16(precision: Precision, device: torch.device) -> str | None:
    """A warning if `precision` is slower than float32 on `device`, else None."""
    if precision.dtype != torch.bfloat16 or has_bfloat16(device):
        return None
    return "bfloat16 is slower than float32 on this CPU: omit --amp and --use-pure-fp16"


class LossScale:
    """Loss scale, on the device, which prevents underflow of float16 gradients. If `dynamic`, it
    doubles after 2,000 steps without overflow and halves on overflow, down to 1 (Micikevicius et
    al., 2018, section 3.2).
    """

    GROWTH_INTERVAL = 2000

    def __init__(
        self, initial: float = 1.0, dynamic: bool = False, device: torch.device | str = "cpu"
    ):
        self.dynamic = dynamic
        self.value = torch.tensor(float(initial), device=device)
        self.clean_steps = torch.zeros((), device=device)

    def update(self, found_inf: Tensor) -> None:
        """`found_inf`: a one-element tensor, positive if the step overflowed."""
        if not self.dynamic:
            return
        overflow = found_inf > 0
        clean_steps = torch.where(overflow, 0.0, self.clean_steps + 1)
        grows = clean_steps >= self.GROWTH_INTERVAL
        grown = torch.where(grows, self.value * 2, self.value)
        self.value.copy_(torch.where(overflow, (self.value / 2).clamp(min=1.0), grown))
        self.clean_steps.copy_(torch.where(grows, 0.0, clean_steps))

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.value), "clean_steps": float(self.clean_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value.fill_(state["value"])
        self.clean_steps.fill_(state["clean_steps"])


class MasterWeights:
    """Float32 master weights of a 16-bit model, updated by the optimizer.

    `add_gradients` adds the model's gradients to the master gradients after each micro-batch. The
    sum is in float32, because a bfloat16 sum stops growing at 256 times its addends. `push_weights`
    copies the masters to the model.
    """

    def __init__(self, model: nn.Module):
        self.model_parameters = dict(model.named_parameters())
        self.masters = {
            name: nn.Parameter(p.detach().to(torch.float32, copy=True))
            for name, p in self.model_parameters.items()
        }

    @torch.no_grad()
    def add_gradients(self) -> None:
        for name, p in self.model_parameters.items():
            if p.grad is None:
                continue
            master = self.masters[name]
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    @torch.no_grad()
    def push_weights(self) -> None:
        torch._foreach_copy_(list(self.model_parameters.values()), list(self.masters.values()))
