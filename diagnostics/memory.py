"""Estimates the memory of a training run from its architecture and flags, before anything is allocated.

`moments` walks through one update and yields what is alive at the end of the forward pass, in the backward pass of each
layer and of the embeddings, and in the optimizer's step. The largest sum is the peak. Every sequence has the full
length, which is the most that a micro-batch holds (see data_loading/packing.py).

Not included: the libraries (about 0.3 GiB per process on a CPU; on a GPU 0.5 to 1 GiB for CUDA and NCCL), and memory
that the allocator cannot reuse. docs/memory.md compares estimates with measurements.

Legend: T tokens in the stream, N sequences, M masked tokens, R tokens whose output is used, S sequence length, E hidden
size, I intermediate size, H heads, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from attention import COMPILED_ON_CPU, default_implementation
from data_loading.packing import MicroBatchLimits
from loss import FLOAT32_ROWS
from modeling import BertPreTrainedModel
from optimizer import SPECS
from precision import Precision
from run_config import ParallelConfig

FLOAT32 = 4
COMPONENTS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "weight copies",
    "communication buffers",
    "checkpoint copy",
)


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of one process depends on, besides the model.

    limits: the sizes of a micro-batch; 0 targets for a span head. micro_batches: per update. world_size: processes.
    saves: whether checkpoints are written.
    """

    limits: MicroBatchLimits
    batch_size: int
    micro_batches: int = 1
    optimizer: str = "Lamb"
    precision: Precision = field(default_factory=Precision)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    saves: bool = True


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per process. peak: on the device, by component, at the moment `moment`; largest: the most of each component
    at any moment; host: on the CPU besides, if the device is a GPU."""

    moment: str
    peak: dict[str, int]
    largest: dict[str, int]
    host: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.peak.values())


def estimate_memory(model: BertPreTrainedModel, settings: MemorySettings) -> MemoryEstimate:
    """The estimate for `model`, which may be on the meta device."""
    resident, host = resident_memory(model, settings)
    all_moments = [(name, resident + alive) for name, alive in moments(model, settings)]
    name, peak = max(all_moments, key=lambda moment: moment[1].total())
    largest = {part: int(max(alive[part] for _, alive in all_moments)) for part in COMPONENTS}
    return MemoryEstimate(name, {part: int(peak[part]) for part in COMPONENTS}, largest, dict(host))


# --- what stays from one update to the next ---------------------------------------------------------------------------


def resident_memory(model: BertPreTrainedModel, settings: MemorySettings) -> tuple[Counter, Counter]:
    """Bytes on the device, and on the host besides."""
    parallel, on_gpu = settings.parallel, settings.device.type != "cpu"
    sharded = parallel.shard_degree > 1
    parameters = num_parameters(model) / parallel.shard_degree
    optimizer_state = FLOAT32 * SPECS[settings.optimizer].state_elements(model) / parallel.shard_degree
    state = Counter({"weights": FLOAT32 * parameters, "optimizer state": optimizer_state})
    if settings.precision.pure and not sharded:  # the optimizer's float32 weights, and the model's
        state["weights"] += settings.precision.dtype.itemsize * parameters
    if not updates_all_tensors_at_once(settings):  # the optimizer keeps its buffer
        state += update_buffers(model, settings)
    if settings.world_size > 1 and not sharded:  # DDP's buckets
        state["gradients"] += FLOAT32 * parameters
    checkpoint = Counter({"checkpoint copy": FLOAT32 * parameters + optimizer_state if settings.saves else 0})
    if not on_gpu:
        return state + checkpoint, Counter()
    if parallel.cpu_offload:
        offloaded = state + Counter({"gradients": FLOAT32 * parameters})
        return Counter(), offloaded + update_buffers(model, settings) + checkpoint
    return state, checkpoint


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def model_gradient_bytes(settings: MemorySettings) -> int:
    """Bytes per element of the gradients that the backward pass computes."""
    return settings.precision.dtype.itemsize if settings.precision.pure else FLOAT32


def update_buffers(model: BertPreTrainedModel, settings: MemorySettings) -> Counter:
    """What a step of the optimizer needs besides gradients and state."""
    sizes, at_once = [p.numel() for p in model.parameters()], updates_all_tensors_at_once(settings)
    elements = SPECS[settings.optimizer].update_elements(sizes, at_once) / settings.parallel.shard_degree
    return Counter({"optimizer state": FLOAT32 * elements})


def updates_all_tensors_at_once(settings: MemorySettings) -> bool:
    return settings.device.type != "cpu" or settings.parallel.shard_degree > 1


# --- one update -------------------------------------------------------------------------------------------------------


def moments(model: BertPreTrainedModel, settings: MemorySettings) -> Iterator[tuple[str, Counter]]:
    """The name of each moment, and the bytes that are alive then besides `resident_memory`."""
    sizes, parallel = Sizes(model, settings), settings.parallel
    mode, layers = parallel.activation_checkpoint, range(sizes.num_layers)
    kept = [sizes.layer_kept(layer, mode) for layer in layers]
    embeddings = sizes.embeddings()
    yield "end of the forward pass", sum(kept, embeddings + sizes.forward_end())
    for layer in reversed(layers):
        recomputed = sizes.layer_kept(layer, "none")
        alive = sum(kept[:layer], embeddings + recomputed + sizes.layer_backward(layer))
        yield f"backward pass of layer {layer}", alive + sizes.gradients(layer)
    yield "backward pass of the embeddings", sizes.embeddings_backward()
    if settings.precision.pure and parallel.shard_degree == 1:
        yield "conversion of the gradients to float32", sizes.master_gradients()
    buffers = update_buffers(model, settings) if updates_all_tensors_at_once(settings) else Counter()
    yield "optimizer step", sizes.optimizer_gradients() + buffers


class Sizes:
    """The bytes of the parts of an update. Elements of matrix products have `product` bytes, those of the residual
    stream and LayerNorm `residual`, those of gradients `gradient`, and those of dropout masks `mask`."""

    def __init__(self, model: BertPreTrainedModel, settings: MemorySettings):
        config, limits, precision = model.config, settings.limits, settings.precision
        self.settings, self.config, self.parallel = settings, config, settings.parallel
        on_cpu, compiled = settings.device.type == "cpu", settings.parallel.compile != "none"
        self.product = precision.dtype.itemsize
        self.residual = self.gradient = self.product if precision.pure else FLOAT32
        # The CPU's own dropout has masks of the width of the states (see cpu/dropout.py); torch's has booleans.
        self.mask = self.product if on_cpu and not compiled else 1
        self.attention = default_implementation(settings.device, precision.dtype)
        if compiled and on_cpu:
            self.attention = COMPILED_ON_CPU
        self.tokens, self.sequences = limits.tokens, settings.batch_size
        if limits.num_sizes == 1:
            self.sequences = limits.sequences
        self.targets = limits.targets
        self.output_rows = self.targets + self.sequences if self.targets else self.tokens
        self.num_layers = config.num_hidden_layers
        self.layer_parameters = num_parameters(model.bert.encoder.layer[0])
        self.parameters = num_parameters(model)
        self.other_parameters = self.parameters - self.num_layers * self.layer_parameters
        self.vocabulary = num_parameters(model.bert.embeddings.word_embeddings)

    # --- forward ---

    def embeddings(self) -> Counter:
        mask = (self.residual if self.mask > 1 else 1) if self.config.hidden_dropout_prob else 0
        return Counter({"activations": self.tokens * self.config.hidden_size * (self.residual + mask)})

    def layer_kept(self, layer: int, mode: str) -> Counter:
        """What a layer keeps for its backward pass: its input with `full`, with `selective` also the outputs of linear
        layers, and otherwise all that its derivatives need."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        tokens, rows = self.tokens, self._rows(layer)
        if mode != "none":
            outputs = 3 * tokens * hidden + rows * (2 * hidden + inner) if mode == "selective" else 0
            return Counter({"activations": tokens * hidden * self.residual + outputs * self.product})
        kept = tokens * hidden * self.product + self._attention_kept(layer) + rows * self._row_bytes()
        return Counter({"activations": kept, "weight copies": self._layer_copies()})

    def forward_end(self) -> Counter:
        """Logits, their gradient, and what the loss computes in float32 on a few rows at a time."""
        hidden, vocabulary, targets = self.config.hidden_size, self.config.padded_vocab_size, self.targets
        alive = Counter({"logits and loss": self._head_activations(), "gradients": self._earlier_gradients()})
        if targets:
            rows = min(targets, FLOAT32_ROWS[self.settings.device.type])
            chunk = rows * vocabulary * FLOAT32 * (1 if self.product == FLOAT32 else 2)
            alive["logits and loss"] += 2 * targets * vocabulary * self.product + chunk
        if self.settings.precision.autocast:
            alive["weight copies"] += vocabulary * hidden * self.product if targets else 0
            if self.parallel.activation_checkpoint != "none":  # autocast keeps its copies for the whole forward pass
                alive["weight copies"] += self.num_layers * self._cached_copies()
        return alive + self._gathered(self.num_layers)

    def _rows(self, layer: int) -> int:
        """The last layer computes only the rows whose output is used after its attention."""
        return self.output_rows if layer == self.num_layers - 1 else self.tokens

    def _pairs(self) -> int:
        """Pairs of tokens, in all heads and sequences."""
        return self.sequences * self.config.num_attention_heads * self.settings.limits.max_seqlen**2

    def _row_bytes(self) -> int:
        """What a layer keeps per token besides its input and attention: the inputs of LayerNorm, dropout masks, and the
        inputs of linear layers and GELU."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        mask = self.mask if self.config.hidden_dropout_prob else 0
        return 2 * hidden * (self.residual + mask) + (2 * hidden + 2 * inner) * self.product

    def _attention_kept(self, layer: int) -> int:
        hidden, has_dropout = self.config.hidden_size, self.config.attention_probs_dropout_prob > 0
        if self.attention == "length_bucketed":  # queries, keys, values; probabilities and their dropout mask
            return self.product * (3 * self.tokens * hidden + self._pairs() * (1 + has_dropout))
        if self.attention == "flash":  # besides, the output, which is also the next linear layer's input
            output = self.tokens * hidden if self._rows(layer) < self.tokens else 0
            softmax = self.tokens * self.config.num_attention_heads * FLOAT32
            return self.product * (3 * self.tokens * hidden + output) + softmax
        padded = self.sequences * self.settings.limits.max_seqlen
        if self.settings.device.type == "cpu":  # probabilities before and after dropout, and its mask
            return self.product * 5 * padded * hidden + self._pairs() * (2 * self.product + has_dropout)
        return self.product * 4 * padded * hidden + padded * self.config.num_attention_heads * FLOAT32

    def _head_activations(self) -> int:
        return self.output_rows * self.config.hidden_size * (3 * self.product + 2 * self.residual)

    def _cached_copies(self) -> int:
        """Autocast's copies of the weights of a layer's linear layers, without query, key and value."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return (hidden**2 + 2 * hidden * inner) * self.product if self.settings.precision.autocast else 0

    def _layer_copies(self) -> int:
        """The fused query, key and value weights, and autocast's copies of the others."""
        return 3 * self.config.hidden_size**2 * self.product + self._cached_copies()

    # --- backward ---

    def layer_backward(self, layer: int) -> Counter:
        """The gradients of a layer's activations: in its feed-forward half, or in its attention, when what the rest of
        the layer kept is freed already."""
        hidden, inner, rows = self.config.hidden_size, self.config.intermediate_size, self._rows(layer)
        feed_forward = rows * (2 * hidden * self.residual + 2 * inner * self.product)
        attention = self.tokens * hidden * (self.residual + 8 * self.product) - rows * self._row_bytes()
        if self.attention != "flash" and self.settings.device.type == "cpu":
            attention += 2 * self._pairs() * self.product
        return Counter({"activations": max(feed_forward, attention)}) + self._gathered(layer + 1)

    def gradients(self, layer: int) -> Counter:
        """The gradients of parameters when `layer` has computed its own. That of the word embedding is held apart until
        the embeddings add their part."""
        later = (self.num_layers - layer) * self.layer_parameters
        tied = self.vocabulary if self.targets else 0
        new = self.gradient * (later + self.other_parameters if self._keeps_new_gradients() else tied)
        if self.parallel.shard_degree > 1:
            new = self.gradient * (self.layer_parameters + self.other_parameters)
            new += FLOAT32 * later / self.parallel.shard_degree
        return Counter({"gradients": new + self._earlier_gradients()})

    def embeddings_backward(self) -> Counter:
        """The embeddings' part of the word embedding's gradient is a tensor of the same size."""
        alive = self.gradients(0) + self._gathered(0)
        activations = 3 * self.tokens * self.config.hidden_size * self.residual
        return alive + Counter({"gradients": self.gradient * self.vocabulary, "activations": activations})

    def master_gradients(self) -> Counter:
        if self._is_replicated():
            return Counter()
        model_gradients = self.gradient * self.parameters if self.settings.micro_batches > 1 else 0
        return Counter({"gradients": FLOAT32 * self.parameters + model_gradients})

    def optimizer_gradients(self) -> Counter:
        if self.parallel.cpu_offload or self._is_replicated():
            return Counter()
        return Counter({"gradients": FLOAT32 * self.parameters / self.parallel.shard_degree})

    def _is_replicated(self) -> bool:
        return self.settings.world_size > 1 and self.parallel.shard_degree == 1

    def _keeps_new_gradients(self) -> bool:
        """Whether new gradients become those of the parameters, instead of being added to others."""
        return not self._is_replicated() and (self.settings.micro_batches == 1 or self.settings.precision.pure)

    def _earlier_gradients(self) -> float:
        """Gradients of the micro-batches before this one; DDP's are among what stays."""
        if self.settings.micro_batches == 1 or self.parallel.cpu_offload:
            return 0
        if self._is_replicated():
            return 0
        return FLOAT32 * self.parameters / self.parallel.shard_degree

    def _gathered(self, num_layers: int) -> Counter:
        """Parameters that FSDP2 has gathered when `num_layers` layers are still to come in the backward pass: what is
        not in layers, the current layer and the next one (or all). Besides, the buffer that they are gathered in, and
        the float32 buffer that gradients are reduced in."""
        if self.parallel.shard_degree == 1:
            return Counter()
        keeps_all = self.parallel.reshard_after_forward == "never"
        layers = num_layers if keeps_all else min(2, num_layers)
        gathered = self.gradient * (self.other_parameters + layers * self.layer_parameters)
        largest = self.layer_parameters if num_layers else self.other_parameters
        return Counter({"weight copies": gathered, "communication buffers": (self.gradient + FLOAT32) * largest})
