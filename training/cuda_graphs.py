"""--cuda-graphs: whole updates as CUDA graphs. The host launches a graph once, instead of each of
its kernels.

There is one graph for each size of batch, captured when the size occurs for the second time. It has
the forward and backward passes, clipping and the optimizer, and reads its batch from memory that
stays.

A graph repeats what the host did when it was captured: a number that the host computes anew for
each update, or memory that it exchanges, would silently stay as it was. So replays 1, 2, 4, 16, 64
... of each graph are checked: the same update is also computed without the graph, from the same
weights and with the same dropout. A difference is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.state import TrainState
from token_stream import MicroBatch, to_device
from utils.errors import UserError, is_out_of_memory, one_line

MAX_GRAPHS = 64  # each needs memory of the driver
# Relative differences: of losses and the norm of the gradient, and of what an update changes. The
# backward pass may add in another order each time, and optimizers divide by small numbers: where a
# gradient is only rounding, as that of keys' biases, the change is another one.
OUTPUT_LIMIT, CHANGE_LIMIT = 1e-3, 5e-2
ADVICE = "leave --cuda-graphs out; the last checkpoint is from before"

MicroBatches = Sequence[MicroBatch]
Counts = tuple[float, float]  # of the global batch: sequences, labelled tokens
Inputs = tuple[MicroBatches, Tensor, Tensor]  # on the device, the counts as tensors
Outputs = dict[str, Tensor]  # scalars
Tensors = dict[str, list[Tensor]]  # by kind
Update = Callable[[MicroBatches, Tensor, Tensor], Outputs]  # of `Inputs`
# Captures what it is given, without computing it; returns what replays it.
Capture = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


class CudaGraphs:
    """Captures CUDA graphs. They share their memory, since one runs after the other, and outputs
    are read before the next replay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, update: Callable[[], Outputs]) -> Callable[[], Outputs]:
        graph = torch.cuda.CUDAGraph()
        self._allow_capture(True)
        try:
            # `thread_local`: the loader's threads pin memory meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = update()
        except RuntimeError as error:
            # Ending a capture that failed fails too.
            first = error if is_out_of_memory(error) else error.__context__ or error
            if is_out_of_memory(first):
                raise first from None
            reason = one_line(str(first))[:200]
            raise UserError(f"an update cannot be captured ({reason}): {ADVICE}") from error
        finally:
            self._allow_capture(False)

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _allow_capture(self, is_allowed: bool) -> None:
        """torch's optimizers refuse without this key. Fused, they do not read it otherwise."""
        for group in self.optimizer.param_groups:
            group["capturable"] = is_allowed


@dataclass
class Graph:
    """inputs: the memory that it reads. count: of its replays."""

    inputs: Inputs
    replay: Callable[[], Outputs]
    count: int = 0


class GraphedUpdates:
    """Makes updates, by a graph if there is one for their size. others: what `update` changes
    besides `state`. updates, replayed, checked: numbers of updates so far.
    """

    def __init__(
        self,
        update: Update,
        state: TrainState,
        others: Tensors,
        capture: Capture,
        device: torch.device,
    ):
        self.update, self.state, self.others = update, state, others
        self.capture, self.device = capture, device
        self.graphs: dict[tuple, Graph] = {}
        self.seen: set[tuple] = set()  # sizes
        self.updates = self.replayed = self.checked = 0

    def report(self) -> tuple[dict[str, int], str]:
        """What to log at the end, and its text."""
        values = {
            "cuda_graph_captures": len(self.graphs),
            "cuda_graph_updates": self.replayed,
            "cuda_graph_checks": self.checked,
        }
        text = (
            f"CUDA graphs: {len(self.graphs)} for {len(self.seen)} sizes of batch; "
            f"{self.replayed:,} of {self.updates:,} updates, {self.checked:,} of them checked"
        )
        return values, text

    def __call__(self, micro_batches: MicroBatches, counts: Counts, seed: int) -> Outputs:
        """Makes the update of micro-batches on the host. Raises UserError if the update cannot be
        captured, or if a check finds a difference.
        """
        size = size_of(micro_batches)
        self.updates += 1
        is_new = size not in self.graphs
        if is_new and (size not in self.seen or len(self.graphs) == MAX_GRAPHS):
            self.seen.add(size)
            return self._without_graph(micro_batches, counts, seed)
        self.replayed += 1
        if is_new or is_checked(self.graphs[size].count + 1):
            return self._checked(size, micro_batches, counts, seed)
        return self._replay(self.graphs[size], micro_batches, counts, seed)

    def _without_graph(self, micro_batches: MicroBatches, counts: Counts, seed: int) -> Outputs:
        torch.manual_seed(seed)
        return self.update(*self._inputs(micro_batches, counts))

    def _inputs(self, micro_batches: MicroBatches, counts: Counts) -> Inputs:
        """Copies on the device. Without the number of sequences, which the host knows and no loss
        needs: a graph would repeat it.
        """
        copies = []
        for micro_batch in micro_batches:
            copy = to_device(micro_batch, self.device)
            del copy["num_sequences"]
            copies.append(copy)
        return copies, *(torch.full((), count, device=self.device) for count in counts)

    def _replay(
        self, graph: Graph, micro_batches: MicroBatches, counts: Counts, seed: int
    ) -> Outputs:
        memory, *count_tensors = graph.inputs
        for own, micro_batch in zip(memory, micro_batches, strict=True):
            for name, value in own.items():
                if isinstance(value, Tensor):
                    value.copy_(micro_batch[name], non_blocking=True)
        for tensor, count in zip(count_tensors, counts, strict=True):
            tensor.fill_(count)
        torch.manual_seed(seed)
        graph.count += 1
        return graph.replay()

    def _changed_tensors(self) -> Tensors:
        """All that an update changes, by kind."""
        state, parallel = self.state, self.state.parallel
        weights = list(parallel.named_parameters().values())
        found = {"weights": weights, "number of updates": [state.device_step]}
        found["loss scale"] = [state.loss_scale.value, state.loss_scale.clean_steps]
        found |= self.others
        if parallel.masters is not None:
            found["16-bit weights"] = list(parallel.model.parameters())
        if state.averages is not None:
            found["averages"] = list(state.averages.tensors.values())
        for p in weights:
            for key, value in state.optimizer.state.get(p, {}).items():
                found.setdefault(key, []).append(value)
        return found

    def _checked(
        self, size: tuple, micro_batches: MicroBatches, counts: Counts, seed: int
    ) -> Outputs:
        """The update by the graph, which is captured if it is new, after the same one without."""
        self.checked += 1
        state = self._changed_tensors()
        before = copy_of(state)
        expected_outputs = self._without_graph(micro_batches, counts, seed)
        expected = copy_of(state)
        restore(state, before)
        if size not in self.graphs:
            inputs = self._inputs(micro_batches, counts)
            replay = self.capture(lambda: self.update(*inputs))
            self.graphs[size] = Graph(inputs, replay)
        graph = self.graphs[size]
        outputs = self._replay(graph, micro_batches, counts, seed)
        wrong = moved(state, self._changed_tensors())
        wrong = wrong or different_output(outputs, expected_outputs)
        wrong = wrong or different_change(state, expected, before)
        if wrong:
            restore(state, expected)
            raise UserError(
                f"replay {graph.count} of a CUDA graph is not the update without the graph: "
                f"{wrong}: {ADVICE}"
            )
        return outputs


def size_of(micro_batches: MicroBatches) -> tuple:
    """What must be equal for a graph: the shapes, and the values on the host."""
    found = []
    for micro_batch in micro_batches:
        for name, value in micro_batch.items():
            if name != "num_sequences":
                found.append(value.shape if isinstance(value, Tensor) else value)
    return tuple(found)


def is_checked(replay: int) -> bool:
    """Whether replay number `replay` of a graph is: 1, 2 and the powers of 4."""
    is_power_of_2 = replay & (replay - 1) == 0
    return replay == 2 or (is_power_of_2 and replay.bit_length() % 2 == 1)


def copy_of(state: Tensors) -> Tensors:
    copies = {}
    for kind, tensors in state.items():
        copies[kind] = [tensor.detach().clone() for tensor in tensors]
    return copies


@torch.no_grad()
def restore(state: Tensors, values: Tensors) -> None:
    for kind, tensors in state.items():
        torch._foreach_copy_(tensors, values[kind])


def moved(before: Tensors, after: Tensors) -> str:
    """Names a kind of tensors whose memory is another one; empty if there is none. A graph goes on
    with the memory that it was captured with.
    """
    for kind, tensors in after.items():
        places = [tensor.data_ptr() for tensor in tensors]
        if places != [tensor.data_ptr() for tensor in before.get(kind, [])]:
            return f"the memory of {kind} is another one"
    return ""


def different_output(found: Outputs, expected: Outputs) -> str:
    """Names an output that differs; empty if there is none. Counts, such as of correct answers,
    follow from what is compared.
    """
    for name, value in expected.items():
        is_close = torch.isclose(found[name], value, rtol=OUTPUT_LIMIT, atol=0.0, equal_nan=True)
        if value.is_floating_point() and not is_close:
            return f"{name} is {float(found[name]):g} instead of {float(value):g}"
    return ""


@torch.no_grad()
def different_change(found: Tensors, expected: Tensors, before: Tensors) -> str:
    """Names a kind of tensors that differs; empty if there is none. Scalars, such as the rate and
    numbers of updates, must be equal.
    """
    for kind, tensors in expected.items():
        if tensors[0].dim() == 0:
            if not torch.equal(torch.stack(found[kind]), torch.stack(tensors)):
                return f"{kind} differ"
            continue
        distance = distance_of(found[kind], tensors)
        change = distance_of(tensors, before[kind])
        if not distance <= CHANGE_LIMIT * change:
            return f"the change of {kind} differs by {distance / max(change, 1e-30):.2g}"
    return ""


def distance_of(tensors: list[Tensor], others: list[Tensor]) -> float:
    """The sum of |tensors - others| over all elements. Squares would let a few decide."""
    sums = torch._foreach_norm(torch._foreach_sub(tensors, others), 1, dtype=torch.float32)
    return float(torch.stack(sums).sum())
