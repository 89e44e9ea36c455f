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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from bert_recipe.config import LoaderConfig, ParallelConfig, RunConfig
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.attention import COMPILED_ON_CPU, default_implementation
from bert_recipe.model.costs.attention import PassSizes
from bert_recipe.model.costs.memory import LayerMemory, activation_memory
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.model.loss import FLOAT32_ROWS
from bert_recipe.optimization.precision import DTYPES, Precision
from bert_recipe.optimization.registry import spec_named
from bert_recipe.parallel.parallelize import check_parallel
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.training.optimizer_memory import update_elements
from bert_recipe.utils.errors import reports_errors
from bert_recipe.utils.progress import print_line

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


class MemorySettings:
    """What determines, with the model, the memory of one process of a run. --device cuda works
    without a GPU.

    loader, parallel: of a run, by default as typed.
    task_memory: see TaskOptions.resident_memory.
    """

    def __init__(
        self,
        config: RunConfig,
        loader: LoaderConfig | None = None,
        parallel: ParallelConfig | None = None,
        task_memory: Mapping[str, float] | None = None,
    ):
        loader, parallel = loader or config.loader, parallel or config.parallel
        runtime, precision = config.runtime, config.precision
        on_gpu = runtime.device == "cuda" or (
            runtime.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if on_gpu else "cpu")
        check_parallel(config, self.device)
        self.parallel, self.task_memory = parallel, Counter(task_memory)
        self.world_size = config.world_size
        self.saves = not config.trainer.benchmark
        per_process = -(-loader.global_batch_size // self.world_size)  # sequences of an update
        self.batch_size = min(loader.batch_size, per_process)
        self.limits = MicroBatchLimits.of(replace(loader, batch_size=self.batch_size))
        self.micro_batches = -(-per_process // self.batch_size)  # per update
        self.optimizer = config.optimizer.name
        self.precision = Precision()
        if precision.amp or precision.pure_fp16:
            self.precision = Precision(DTYPES[precision.amp_dtype], precision.pure_fp16)
        self.is_sharded = self.parallel.shard_degree > 1
        self.is_replicated = self.world_size > 1 and not self.is_sharded
        self.updates_all_tensors_at_once = on_gpu or self.is_sharded

    @property
    def pass_sizes(self) -> PassSizes:
        limits, product = self.limits, self.precision.dtype.itemsize
        on_cpu = self.device.type == "cpu"
        compiled = self.parallel.compiles
        attention = self.parallel.attention  # which check_parallel has loaded
        if attention == "auto":
            attention = default_implementation(self.device, self.precision.dtype)
        return PassSizes(
            limits.tokens,
            self.batch_size,
            limits.labelled_tokens,
            limits.max_seqlen,
            product,
            residual=product if self.precision.pure else FLOAT32,
            # model/kernels/dropout.py has masks with the element size of the states; torch's masks
            # are booleans.
            mask=product if on_cpu and not compiled else 1,
            attention=COMPILED_ON_CPU if compiled and on_cpu else attention,
            autocast=self.precision.autocast,
            device_type=self.device.type,
        )


Bytes = Counter[str]  # by component


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per process.

    moment: the phase of an update with the largest sum.
    peak: on the device, by component, in that phase.
    largest: maximum of each component over phases.
    host: additional CPU memory, if the device is a GPU.
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
    """The estimate of a run. model: the trained one, which may be on the meta device."""
    resident, host = resident_memory(model, settings)
    resident += settings.task_memory
    alive = {name: resident + memory for name, memory in phases(model, settings)}
    moment = max(alive, key=lambda name: alive[name].total())
    largest = {part: int(max(memory[part] for memory in alive.values())) for part in COMPONENTS}
    return MemoryEstimate(
        moment, {part: int(alive[moment][part]) for part in COMPONENTS}, largest, dict(host)
    )


def resident_memory(model: PreTrainedModel, settings: MemorySettings) -> tuple[Bytes, Bytes]:
    """Bytes that stay allocated between updates, on the device and on the host."""
    on_cpu = settings.device.type == "cpu"
    precision = settings.precision
    parameters = num_parameters(model) / settings.parallel.shard_degree
    optimizer_state = FLOAT32 * spec_named(settings.optimizer).state_elements(
        model, settings.parallel.shard_degree
    )
    state = Counter(
        {
            "weights": FLOAT32 * parameters,
            "optimizer state": optimizer_state,
        }
    )
    model_weights: Bytes = Counter()  # besides the float32 weights of the optimizer
    if not settings.is_sharded and (precision.pure or settings.parallel.cpu_offload):
        model_weights["weights"] = int(settings.pass_sizes.residual * parameters)
    if not settings.updates_all_tensors_at_once:  # the optimizer keeps its buffer
        state += update_buffers(model, settings)
    if settings.is_replicated:  # DDP's buckets
        state["gradients"] += int(FLOAT32 * parameters)
    saved = state["weights"] + optimizer_state
    checkpoint = Counter({"checkpoint copy": saved if settings.saves else 0})
    if on_cpu:
        return state + model_weights + checkpoint, Counter()
    if settings.parallel.cpu_offload:
        state += Counter({"gradients": FLOAT32 * parameters})
        return model_weights, state + update_buffers(model, settings) + checkpoint
    return state + model_weights, checkpoint


def update_buffers(model: PreTrainedModel, settings: MemorySettings) -> Bytes:
    """Temporary memory of an optimizer step, besides gradients and state."""
    ranks = settings.parallel.shard_degree, settings.world_size
    elements = update_elements(
        settings.optimizer, model, settings.updates_all_tensors_at_once, *ranks
    )
    return Counter({"optimizer state": FLOAT32 * elements})


def phases(model: PreTrainedModel, settings: MemorySettings) -> Iterator[tuple[str, Bytes]]:
    """Yields the name of each phase of an update, and its live bytes besides `resident_memory`."""
    update = UpdateMemory(model, settings)
    yield "end of the forward pass", update.forward_end()
    for index in reversed(range(update.num_layers)):
        yield f"backward pass of layer {index}", update.layer_backward(index)
    yield "backward pass of the embeddings", update.embeddings_backward()
    if update.converts_gradients:
        yield "conversion of the gradients to float32", update.conversion()
    yield "optimizer step", update.optimizer_step()


class UpdateMemory:
    """The live bytes of each phase of an update, by component, besides `resident_memory`."""

    def __init__(self, model: PreTrainedModel, settings: MemorySettings):
        self.model, self.settings, self.sizes = model, settings, settings.pass_sizes
        self.activations = activation_memory(model, self.sizes)
        self.num_layers = len(self.activations.layers)
        self.layer_parameters = [num_parameters(layer) for layer in model.layers]
        self.other_parameters = num_parameters(model) - sum(self.layer_parameters)
        self.vocabulary = num_parameters(model.word_embeddings)
        self.gradient_size = self.sizes.residual  # bytes of an element
        self.shards = settings.parallel.shard_degree
        self.masters = FLOAT32 * num_parameters(model) / self.shards
        self.accumulates = settings.micro_batches > 1

    @property
    def converts_gradients(self) -> bool:
        """Whether 16-bit gradients become float32 ones at the end of the backward pass."""
        is_single = not (self.settings.is_sharded or self.settings.is_replicated)
        return self.settings.precision.pure and is_single

    def forward_end(self) -> Bytes:
        kept = sum(map(self.kept_by, self.activations.layers), self.embeddings())
        last = self.logits() + Counter({"gradients": self.earlier_gradients()})
        if self.settings.parallel.activation_checkpoint != "none":
            # Autocast caches its copies for the whole forward pass.
            last["weight copies"] += sum(layer.cached_copies for layer in self.activations.layers)
        return kept + last + self.gathered(self.num_layers)

    def layer_backward(self, index: int) -> Bytes:
        kept = sum(map(self.kept_by, self.activations.layers[:index]), self.embeddings())
        layer = self.activations.layers[index]
        in_layer = Counter(
            {"activations": layer.kept + layer.backward, "weight copies": layer.weight_copies}
        )
        return kept + in_layer + self.gathered(index + 1) + self.gradients(index)

    def embeddings_backward(self) -> Bytes:
        """Their part of the word embedding's gradient is a tensor of the same size."""
        in_embeddings = Counter(
            {
                "gradients": self.gradient_size * self.vocabulary,
                "activations": self.activations.embeddings_backward,
            }
        )
        return self.gradients(0) + self.gathered(0) + in_embeddings

    def conversion(self) -> Bytes:
        sums = self.gradient_size * num_parameters(self.model) if self.accumulates else 0
        return Counter({"gradients": self.masters + sums})

    def optimizer_step(self) -> Bytes:
        settings = self.settings
        step: Bytes = Counter()
        if not (settings.parallel.cpu_offload or settings.is_replicated):
            step["gradients"] = int(self.masters)
        if settings.updates_all_tensors_at_once and not settings.parallel.cpu_offload:
            step += update_buffers(self.model, settings)
        return step

    def embeddings(self) -> Bytes:
        return Counter({"activations": self.activations.embeddings})

    def kept_by(self, layer: LayerMemory) -> Bytes:
        """What a layer keeps until its backward pass."""
        mode = self.settings.parallel.activation_checkpoint
        if mode == "none":
            return Counter({"activations": layer.kept, "weight copies": layer.weight_copies})
        outputs = layer.linear_outputs if mode == "selective" else 0
        return Counter({"activations": layer.input + outputs})

    def logits(self) -> Bytes:
        """The head, the logits, over which their gradient is written, and the loss's two float32
        chunks.
        """
        sizes = self.sizes
        memory = Counter({"logits and loss": self.activations.head})
        if sizes.num_masked:
            rows = min(sizes.num_masked, FLOAT32_ROWS[sizes.device_type])
            bytes_per_word = sizes.num_masked * sizes.product + 2 * rows * FLOAT32
            memory["logits and loss"] += self.model.config.padded_vocab_size * bytes_per_word
            if sizes.autocast:
                memory["weight copies"] += self.vocabulary * sizes.product
        return memory

    def earlier_gradients(self) -> float:
        """Gradients of earlier micro-batches, except DDP's, which are resident."""
        is_offloaded = self.settings.parallel.cpu_offload and self.settings.is_sharded
        is_kept = self.accumulates and not is_offloaded and not self.settings.is_replicated
        return self.masters if is_kept else 0

    def gathered(self, layers: int) -> Bytes:
        """Parameters gathered by FSDP2 when the backward pass has `layers` layers left: those
        outside the layers, and the current and the next layer, or all; with the all-gather buffer
        and the float32 reduce-scatter buffer.
        """
        if not self.settings.is_sharded:
            return Counter()
        first = max(layers - 2, 0)
        end = layers
        if self.settings.parallel.reshard_after_forward == "never":
            first = 0
            end = self.num_layers if self.accumulates else layers
        alive = self.other_parameters + sum(self.layer_parameters[first:end])
        largest = self.layer_parameters[layers - 1] if layers else self.other_parameters
        return Counter(
            {
                "weight copies": self.gradient_size * alive,
                "communication buffers": (self.gradient_size + FLOAT32) * largest,
            }
        )

    def gradients(self, layer: int) -> Bytes:
        """Gradients of parameters after the backward pass of `layer`. The head's gradient of the
        word embedding is separate until the embeddings add theirs.
        """
        settings = self.settings
        later = sum(self.layer_parameters[layer:])
        if settings.is_sharded:
            gathered = self.layer_parameters[layer] + self.other_parameters
            new = self.gradient_size * gathered + FLOAT32 * later / self.shards
        elif settings.is_replicated or (self.accumulates and not settings.precision.pure):
            new = self.gradient_size * self.vocabulary if self.sizes.num_masked else 0
        else:  # assigned to the parameters, not accumulated
            new = self.gradient_size * (later + self.other_parameters)
        return Counter({"gradients": new + self.earlier_gradients()})


def print_estimate(config: RunConfig, options: TaskOptions, architecture: ModelConfig) -> None:
    """Prints --estimate-memory's table on the first process."""
    loader, task_memory = config.loader, options.resident_memory()
    if not config.arguments.given("max_seq_length"):
        length = min(loader.max_seq_length, architecture.max_length)
        loader = replace(loader, max_seq_length=length)
    loader = options.in_sequences(loader)
    settings = MemorySettings(config, loader, task_memory=task_memory)
    with torch.device("meta"):
        model = make_model(options.head, architecture)
    estimate = estimate_memory(model, settings)
    precision = settings.precision
    dtype = str(precision.dtype).removeprefix("torch.")
    if precision.autocast:
        dtype += " with float32 weights"
    rows = [(part, estimate.peak[part], size) for part, size in estimate.largest.items() if size]
    unit, power, decimals = ("GiB", 30, 0) if estimate.total >= 2**30 else ("MiB", 20, 2)
    lines = [
        f"Estimated memory of each of {settings.world_size} x {settings.device.type}, in {unit}: "
        f"{num_parameters(model) / 1e6:,.{decimals}f} million parameters, {settings.batch_size} x "
        f"{settings.limits.max_seqlen} tokens, {dtype}, {settings.optimizer}",
        f"  {'':<24}{'at the peak':>12}{'largest':>10}",
        *(
            f"  {part:<24}{peak / 2**power:>12.2f}{largest / 2**power:>10.2f}"
            for part, peak, largest in rows
        ),
        f"  {'total':<24}{estimate.total / 2**power:>12.2f}  (in the {estimate.moment})",
        *(
            f"  {f'on the host: {part}':<36}{size / 2**power:>10.2f}"
            for part, size in estimate.host.items()
        ),
        "The libraries themselves are not included: 0.3 GiB per process on a CPU, 0.5 to 1 GiB on "
        "a GPU.",
    ]
    if config.arguments.get("frozen_encoder") or config.trainer.freeze_layers:
        lines.append("All layers are assumed to be trained: frozen ones need less.")
    if "global_batch_size" in config.chosen_by_rule:
        lines.append(
            f"A batch of {config.loader.global_batch_size} is the largest that the rows choose; "
            "--train-batch-size gives another."
        )
    if reports_errors():
        print_line("\n".join(lines))
