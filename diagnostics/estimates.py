"""Estimates the memory of a training run from the model and the flags.

`phases` yields the live memory at each point of an update: the end of the forward pass, the
backward pass of each layer and of the embeddings, and the optimizer step. The maximum is the peak.
All sequences are assumed to have full length, the maximum of a micro-batch (see
data_loading/packing.py). The model reports the memory of its activations.

Not included: the libraries (about 0.3 GiB per process on a CPU; on a GPU 0.5 to 1 GiB for CUDA and
NCCL), and memory that the allocator cannot reuse. docs/memory.md compares estimates with
measurements.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from attention import COMPILED_ON_CPU, PassSizes, default_implementation
from checkpoint.start import choose_model_of
from data_loading.packing import MicroBatchLimits
from encoders.base import PreTrainedModel
from loss import FLOAT32_ROWS
from modeling import make_model
from optimizer import SPECS
from parallelize import check_parallel
from precision import DTYPES, Precision
from run_config import RunConfig
from tasks import Task
from utils.errors import reports_errors
from utils.progress import print_line

FLOAT32 = 4
COMPONENTS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "weight copies",
)
COMPONENTS += ("communication buffers", "checkpoint copy")


class MemorySettings:
    """What determines, with the model, the memory of one process of a run. --device cuda works
    without a GPU.
    """

    def __init__(self, config: RunConfig):
        loader, runtime, precision = config.loader, config.runtime, config.precision
        on_gpu = runtime.device == "cuda" or (
            runtime.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if on_gpu else "cpu")
        check_parallel(config, self.device)
        self.parallel, self.world_size, self.saves = (
            config.parallel,
            config.world_size,
            not config.trainer.benchmark,
        )
        self.limits = MicroBatchLimits.of(loader)
        self.batch_size, self.averages = loader.batch_size, config.trainer.ema is not None
        self.micro_batches = -(
            -loader.global_batch_size // (self.world_size * loader.batch_size)
        )  # per update
        self.optimizer, self.precision = config.optimizer.name, Precision()
        if precision.amp or precision.pure_fp16:
            self.precision = Precision(DTYPES[precision.amp_dtype], precision.pure_fp16)
        self.is_sharded = self.parallel.shard_degree > 1
        self.is_replicated = self.world_size > 1 and not self.is_sharded
        self.updates_all_tensors_at_once = on_gpu or self.is_sharded

    @property
    def pass_sizes(self) -> PassSizes:
        limits, product = self.limits, self.precision.dtype.itemsize
        on_cpu, compiled = self.device.type == "cpu", self.parallel.compiles
        attention = default_implementation(self.device, self.precision.dtype)
        if self.parallel.attention == "triton":
            attention = "triton"
        return PassSizes(
            limits.tokens,
            self.batch_size,
            limits.labelled_tokens,
            limits.max_seqlen,
            product,
            residual=product if self.precision.pure else FLOAT32,
            # kernels/dropout.py has masks with the element size of the states; torch's masks are
            # booleans.
            mask=product if on_cpu and not compiled else 1,
            attention=COMPILED_ON_CPU if compiled and on_cpu else attention,
            autocast=self.precision.autocast,
            device_type=self.device.type,
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per process. peak: on the device, by component, in the phase `moment`; largest: maximum
    of each component over phases; host: additional CPU memory, if the device is a GPU.
    """

    moment: str
    peak: dict[str, int]
    largest: dict[str, int]
    host: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.peak.values())


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def estimate_memory(model: PreTrainedModel, settings: MemorySettings) -> MemoryEstimate:
    """The estimate for `model`, which may be on the meta device."""
    resident, host = resident_memory(model, settings)
    alive = {name: resident + memory for name, memory in phases(model, settings)}
    moment = max(alive, key=lambda name: alive[name].total())
    largest = {part: int(max(memory[part] for memory in alive.values())) for part in COMPONENTS}
    return MemoryEstimate(
        moment, {part: int(alive[moment][part]) for part in COMPONENTS}, largest, dict(host)
    )


def resident_memory(model: PreTrainedModel, settings: MemorySettings) -> tuple[Counter, Counter]:
    """Bytes that stay allocated between updates, on the device and on the host."""
    on_cpu, precision = settings.device.type == "cpu", settings.precision
    parameters = num_parameters(model) / settings.parallel.shard_degree
    optimizer_state = FLOAT32 * SPECS[settings.optimizer].state_elements(
        model, settings.parallel.shard_degree
    )
    state = Counter(
        {
            "weights": FLOAT32 * parameters * (1 + settings.averages),
            "optimizer state": optimizer_state,
        }
    )
    model_weights = Counter()  # besides the float32 weights of the optimizer
    if not settings.is_sharded and (precision.pure or settings.parallel.cpu_offload):
        model_weights["weights"] = settings.pass_sizes.residual * parameters
    if not settings.updates_all_tensors_at_once:  # the optimizer keeps its buffer
        state += update_buffers(model, settings)
    if settings.is_replicated:  # DDP's buckets
        state["gradients"] += FLOAT32 * parameters
    saved = state["weights"] + optimizer_state
    checkpoint = Counter({"checkpoint copy": saved if settings.saves else 0})
    if on_cpu:
        return state + model_weights + checkpoint, Counter()
    if settings.parallel.cpu_offload:
        state += Counter({"gradients": FLOAT32 * parameters})
        return model_weights, state + update_buffers(model, settings) + checkpoint
    return state + model_weights, checkpoint


def update_buffers(model: PreTrainedModel, settings: MemorySettings) -> Counter:
    """Temporary memory of an optimizer step, besides gradients and state."""
    ranks = settings.parallel.shard_degree, settings.world_size
    elements = SPECS[settings.optimizer].update_elements(
        model, settings.updates_all_tensors_at_once, *ranks
    )
    return Counter({"optimizer state": FLOAT32 * elements})


def phases(model: PreTrainedModel, settings: MemorySettings) -> Iterator[tuple[str, Counter]]:
    """Yields the name of each phase of an update, and its live bytes besides `resident_memory`."""
    sizes, parallel, precision = settings.pass_sizes, settings.parallel, settings.precision
    memory, mode, shards = (
        model.activation_memory(sizes),
        parallel.activation_checkpoint,
        parallel.shard_degree,
    )
    gradient, masters = sizes.residual, FLOAT32 * num_parameters(model) / shards
    layer_parameters = [num_parameters(layer) for layer in model.layers]
    other_parameters = num_parameters(model) - sum(layer_parameters)
    vocabulary = num_parameters(model.word_embeddings)
    num_layers = len(memory.layers)
    embeddings = Counter({"activations": memory.embeddings})
    kept = []  # per layer, until its backward pass
    for layer in memory.layers:
        if mode == "none":
            kept.append(Counter({"activations": layer.kept, "weight copies": layer.weight_copies}))
        else:
            kept.append(
                Counter(
                    {
                        "activations": layer.input
                        + (layer.linear_outputs if mode == "selective" else 0)
                    }
                )
            )

    # Gradients of earlier micro-batches, except DDP's, which are resident.
    offloads_sums = parallel.cpu_offload and settings.is_sharded
    keeps_sums = settings.micro_batches > 1 and not offloads_sums and not settings.is_replicated
    earlier = masters if keeps_sums else 0

    def gathered(layers: int) -> Counter:
        """Parameters gathered by FSDP2 when the backward pass has `layers` layers left: those
        outside the layers, and the current and the next layer, or all; with the all-gather buffer
        and the float32 reduce-scatter buffer.
        """
        if not settings.is_sharded:
            return Counter()
        first, end = max(layers - 2, 0), layers
        if parallel.reshard_after_forward == "never":
            first, end = 0, num_layers if settings.micro_batches > 1 else layers
        largest = layer_parameters[layers - 1] if layers else other_parameters
        return Counter(
            {
                "weight copies": gradient * (other_parameters + sum(layer_parameters[first:end])),
                "communication buffers": (gradient + FLOAT32) * largest,
            }
        )

    def gradients(layer: int) -> Counter:
        """Gradients of parameters after the backward pass of `layer`. The head's gradient of the
        word embedding is separate until the embeddings add theirs.
        """
        later = sum(layer_parameters[layer:])
        if settings.is_sharded:
            new = gradient * (layer_parameters[layer] + other_parameters) + FLOAT32 * later / shards
        elif not settings.is_replicated and (settings.micro_batches == 1 or precision.pure):
            new = gradient * (
                later + other_parameters
            )  # assigned to the parameters, not accumulated
        else:
            new = gradient * vocabulary if sizes.num_masked else 0
        return Counter({"gradients": new + earlier})

    forward_end = Counter({"logits and loss": memory.head, "gradients": earlier})
    if (
        sizes.num_masked
    ):  # logits, over which their gradient is written, and the loss's two float32 chunks
        words = model.config.padded_vocab_size
        chunks = 2 * min(sizes.num_masked, FLOAT32_ROWS[sizes.device_type]) * FLOAT32
        forward_end["logits and loss"] += words * (sizes.num_masked * sizes.product + chunks)
        forward_end["weight copies"] += vocabulary * sizes.product if sizes.autocast else 0
    if mode != "none":  # autocast caches its copies for the whole forward pass
        forward_end["weight copies"] += sum(layer.cached_copies for layer in memory.layers)
    yield "end of the forward pass", sum(kept, embeddings + forward_end) + gathered(num_layers)

    for index in reversed(range(num_layers)):
        layer = memory.layers[index]
        own = Counter(
            {"activations": layer.kept + layer.backward, "weight copies": layer.weight_copies}
        )
        yield (
            f"backward pass of layer {index}",
            sum(kept[:index], embeddings + own) + gathered(index + 1) + gradients(index),
        )

    # The embeddings' part of the word embedding's gradient is a tensor of the same size.
    own = Counter({"gradients": gradient * vocabulary, "activations": memory.embeddings_backward})
    yield "backward pass of the embeddings", gradients(0) + gathered(0) + own
    if precision.pure and not (settings.is_sharded or settings.is_replicated):
        model_gradients = gradient * num_parameters(model) if settings.micro_batches > 1 else 0
        yield (
            "conversion of the gradients to float32",
            Counter({"gradients": masters + model_gradients}),
        )
    step = (
        Counter()
        if parallel.cpu_offload or settings.is_replicated
        else Counter({"gradients": masters})
    )
    if settings.updates_all_tensors_at_once and not parallel.cpu_offload:
        step += update_buffers(model, settings)
    yield "optimizer step", step


def print_estimate(config: RunConfig, task: Task) -> None:
    """Prints --estimate-memory's table on the first process."""
    with torch.device("meta"):
        model = make_model(task.head, choose_model_of(config).config)
    settings = MemorySettings(replace(config, loader=task.in_sequences(config.loader)))
    estimate, precision = estimate_memory(model, settings), settings.precision
    dtype = str(precision.dtype).removeprefix("torch.")
    if precision.autocast:
        dtype += " with float32 weights"
    rows = [(part, estimate.peak[part], size) for part, size in estimate.largest.items() if size]
    lines = [
        f"Estimated memory of each of {settings.world_size} x {settings.device.type}, in GiB: "
        f"{num_parameters(model) / 1e6:,.0f} million parameters, {settings.batch_size} x "
        f"{settings.limits.max_seqlen} tokens, {dtype}, {settings.optimizer}",
        f"  {'':<24}{'at the peak':>12}{'largest':>10}",
        *(
            f"  {part:<24}{peak / 2**30:>12.2f}{largest / 2**30:>10.2f}"
            for part, peak, largest in rows
        ),
        f"  {'total':<24}{estimate.total / 2**30:>12.2f}  (in the {estimate.moment})",
        *(
            f"  {f'on the host: {part}':<36}{size / 2**30:>10.2f}"
            for part, size in estimate.host.items()
        ),
        "The libraries themselves are not included: 0.3 GiB per process on a CPU, 0.5 to 1 GiB on "
        "a GPU.",
    ]
    if reports_errors():
        print_line("\n".join(lines))
