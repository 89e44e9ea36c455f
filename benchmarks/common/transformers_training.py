"""Training with transformers, as its examples do, with this project's schedule, optimizer groups
and sample order.
"""

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.training import LEARNING_RATE, MAX_GRAD_NORM, fused_adamw
from benchmarks.common.worker import TRANSFORMERS
from bert_recipe.config import OptimizerConfig, ScheduleConfig
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.optimization.lr_scheduler import make_schedule
from bert_recipe.optimization.protocol import parameter_groups
from bert_recipe.utils.command_line import Flag
from bert_recipe.utils.progress import print_line, progress_bar

LOG_FREQ = 10  # updates between two readings of the loss, as in the programs
OPTIMIZERS = ("AdamW", "Muon")
GROUP_BATCHES = 50  # of transformers' sampler by length
PEER_ATTENTION = Flag(
    "--peer-attention",
    ("sdpa", "eager"),
    None,
    "transformers' (default: with --amp flash attention where it is installed, else sdpa)",
)


def silence_imports() -> None:
    """Call before transformers or torchao is imported: torchao logs the kernels that it cannot
    load.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def masked_lm_model(config: dict[str, Any]) -> nn.Module:
    """transformers' model for masked language modelling with random weights, at its best:
    ModernBERT's computes logits for masked tokens only, which it does not do by default. BERT's
    class has no such switch.
    """
    silence_imports()
    from transformers import AutoConfig, AutoModelForMaskedLM

    has_switch = config["model_type"] == "modernbert"
    values = config | ({"sparse_prediction": True} if has_switch else {})
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**values))


def peer_attention(args: Namespace) -> str:
    """The attention of transformers' models, by --peer-attention and --amp."""
    from transformers.utils import is_flash_attn_2_available

    best = "flash_attention_2" if args.amp and is_flash_attn_2_available() else "sdpa"
    return args.peer_attention or best


def describe(model: nn.Module, amp: bool, **more: Any) -> dict[str, Any]:
    """The settings of transformers' model that decide its speed, for the result file."""
    config = model.config
    return {
        "class": type(model).__name__,
        "attention": config._attn_implementation,
        "logits of masked tokens only": getattr(config, "sparse_prediction", False),
        "precision": precision_name(amp),
        **more,
    }


def precision_name(amp: bool) -> str:
    return "float32 weights, bfloat16 autocast" if amp else "float32"


def make_optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """One of OPTIMIZERS: fused AdamW, or torch's Muon for the matrices of hidden layers and AdamW
    for all others, with one learning rate for both and this project's decay of weights.
    """
    if name == "AdamW":
        return [fused_adamw(model)]
    config = OptimizerConfig()
    matrices = hidden_matrices(model)
    others = {key: p for key, p in model.named_parameters() if key not in matrices}
    groups = parameter_groups(model, config.weight_decay, others)
    adamw = torch.optim.AdamW(groups, LEARNING_RATE, config.betas, config.eps, fused=True)
    muon = Float32Muon(
        list(matrices.values()),
        LEARNING_RATE,
        config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adamw, muon]


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear layers, without the output matrix, which is the embedding."""
    outputs = {id(module) for module in (model.get_output_embeddings(),)}
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in outputs
    }


class Float32Muon(torch.optim.Muon):
    """torch's Muon with orthogonalization in float32. torch's own is in bfloat16, which a CPU
    without instructions for it emulates: 490 instead of 27 ms for a ModernBERT of 2 layers of 128.
    """

    def step(self, closure: Any = None) -> Any:
        with patch("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz_float32):
            return super().step(closure)


def newton_schulz_float32(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """What torch.optim.Muon computes, without its cast to bfloat16."""
    a, b, c = coefficients
    is_tall = grad.size(0) > grad.size(1)
    x = grad.T if is_tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def order_grouped_by_length(
    lengths: Sequence[int], batch_size: int, num_drawn: int, seed: int
) -> np.ndarray:
    """The numbers of the first `num_drawn` samples that transformers' own sampler draws, epoch
    after epoch. Samples of similar length are found among GROUP_BATCHES batches, as in a set of
    four times as many or more: the sampler takes fewer from a smaller set, of which this one may be
    a part.
    """
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    while len(drawn) < num_drawn:
        drawn += get_length_grouped_indices(list(lengths), batch_size, GROUP_BATCHES, generator)
    return np.array(drawn[:num_drawn])


class TransformersTrainer:
    """Makes `max_steps` updates with the schedule of `config` and a model of transformers.

    make_batch: gets the numbers of a batch's samples; every epoch has an order of its own.
    amp: bfloat16 autocast.
    optimizer: one of OPTIMIZERS.
    lengths: the samples' tokens, for batches of samples of similar length, as transformers' Trainer
        makes them with train_sampling_strategy="group_by_length"; None: this project's order.
    """

    def __init__(
        self,
        model: nn.Module,
        num_samples: int,
        make_batch: Callable[[np.ndarray], dict[str, Tensor]],
        config: ScheduleConfig,
        max_steps: int,
        batch_size: int,
        seed: int,
        amp: bool = False,
        optimizer: str = "AdamW",
        lengths: Sequence[int] | None = None,
    ):
        self.model = model.train()
        self.make_batch = make_batch
        self.forward: Callable[..., Any] = model  # or the model compiled
        self.batch_size, self.amp, self.max_steps = batch_size, amp, max_steps
        self.optimizers = make_optimizers(model, optimizer)
        self.schedule = make_schedule(config, max_steps)
        num_drawn = self.max_steps * batch_size
        if lengths is None:
            self.order = sample_order(np.arange(num_drawn), num_samples, seed)
        else:
            self.order = order_grouped_by_length(lengths, batch_size, num_drawn, seed)
        self.device_type = next(model.parameters()).device.type

    def update(self, step: int) -> Tensor:
        """The loss of update `step`, counted from 0."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule(step)
        first = step * self.batch_size
        batch = self.make_batch(self.order[first : first + self.batch_size])
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.amp):
            loss = self.forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def train(self) -> float:
        """Makes all updates; returns the seconds."""
        started = time.perf_counter()
        with progress_bar(self.max_steps, TRANSFORMERS, "step") as bar:
            for step in range(self.max_steps):
                loss = self.update(step)
                bar.update()
                if (step + 1) % LOG_FREQ == 0 or step + 1 == self.max_steps:
                    print_line(
                        f"{TRANSFORMERS}: step {step + 1}/{self.max_steps}  loss {float(loss):.4g}"
                    )
        return time.perf_counter() - started
