"""Process groups: rank, world size, and small collectives on the CPU.

torchrun, also by Slurm, or DeepSpeed's launcher starts the processes and sets RANK, WORLD_SIZE and
LOCAL_RANK.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from bert_recipe.utils import collectives
from bert_recipe.utils.errors import PeerError, RankFailure, UserError, report_error, restart_code
from bert_recipe.utils.rank_environment import RankEnvironment, read_environment
from bert_recipe.utils.rendezvous import join, no_stderr

Result = TypeVar("Result")

PEERS_TIMEOUT = 3.0  # seconds to wait for the errors of other processes
JOIN_MINUTES = 5.0
DEVICE_POLL_SECONDS = 0.002
COLLECTIVE_MINUTES = 30.0  # long, because ranks wait while rank 0 verifies large checkpoints


@dataclass
class DistributedContext(RankEnvironment):
    """Rank, world size and CPU process group. The group is used for counts and flags, without
    device synchronization; it is None with one process and after `destroy`.

    join_minutes: timeout for connecting the ranks.
    collective_minutes: timeout of a collective.
    """

    cpu_group: "dist.ProcessGroup | None" = None
    join_minutes: float = JOIN_MINUTES
    collective_minutes: float = COLLECTIVE_MINUTES
    groups: "dict[object, dist.ProcessGroup]" = field(default_factory=dict)  # see `new_group`

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks, on all ranks; exact for whole numbers up to 2^53."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with translate_peer_failure():
            collectives.all_reduce(tensor, self.cpu_group)
        return tensor.tolist()

    def gather_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all ranks, in the order of ranks, and the index of this rank's first row."""
        if self.world_size == 1:
            return rows, 0
        local_counts = [0] * self.world_size
        local_counts[self.rank] = len(rows)
        counts = [int(count) for count in self.all_reduce_sum(local_counts)]  # of each rank
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        with translate_peer_failure():
            collectives.all_gather(parts, padded, self.cpu_group if rows.is_cpu else None)
        all_rows = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return all_rows, sum(counts[: self.rank])

    def barrier(self) -> None:
        self.all_reduce_sum([0])

    def wait_for_device(self, device: torch.device) -> None:
        """Waits until the GPUs of all ranks have done what was started; called on all ranks before
        any reads from its GPU. A rank that dies meanwhile raises RankFailure. In the wait of a read
        itself it would go unseen, because NCCL's kernels wait for it without an end.
        """
        if self.world_size == 1 or device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        while self.all_reduce_sum([event.query()])[0] < self.world_size:
            time.sleep(DEVICE_POLL_SECONDS)

    def broadcast_json(self, value: Any = None) -> Any:
        """The main process's JSON-like `value`, on all ranks."""
        if self.world_size == 1:
            return value
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(encoded)])
        with translate_peer_failure():
            collectives.broadcast(size, self.cpu_group, 0)
            if not self.is_main:
                encoded = torch.empty(int(size), dtype=torch.uint8)
            collectives.broadcast(encoded, self.cpu_group, 0)
        return json.loads(bytes(encoded.tolist()))

    def on_main(self, function: Callable[[], Result]) -> Result:
        """Calls `function` on the main process only, and returns its JSON-like result on all ranks.
        If it raises UserError, the main process raises that and the others raise PeerError.
        """
        if self.world_size == 1:
            return function()
        outcome: dict[str, Any] = {}
        error: UserError | None = None
        if self.is_main:
            try:
                outcome = {"result": function()}
            except UserError as raised:
                error = raised
        outcome = self.broadcast_json(outcome)
        if error is not None:
            raise error
        if "result" not in outcome:
            raise PeerError("the main process of this run has ended with an error")
        return outcome["result"]

    def new_group(
        self, ranks: Sequence[int] | None = None, backend: str | None = None
    ) -> "dist.ProcessGroup":
        """A process group of `ranks`, which this rank is one of, or of all ranks. Called on all
        ranks, which may name different groups. The next run in this process (--num-seeds) gets the
        same one. Raises UserError without a long timeout if a rank has exited.
        """
        key = ranks and tuple(ranks), backend
        if key not in self.groups:
            self.groups[key] = self.connect_group(ranks, backend)
        return self.groups[key]

    def connect_group(
        self, ranks: Sequence[int] | None, backend: str | None
    ) -> "dist.ProcessGroup":
        if self.cpu_group is not None:
            self.barrier()  # a rank may come late, for as long as a collective may take
        with translate_peer_failure(while_joining=True):
            timeout = datetime.timedelta(minutes=self.join_minutes)
            group = dist.new_group(
                ranks, timeout, backend, use_local_synchronization=ranks is not None
            )
        set_timeout(group, self.collective_minutes)
        return group

    def destroy(self) -> None:
        """Destroys the process group. Gloo's threads stop with the last reference to their group; a
        thread that releases a tensor during interpreter shutdown aborts the program. DDP keeps a
        reference to the default group, so `cpu_group`, which is used last, is a separate group.
        """
        self.cpu_group = None
        self.groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def set_timeout(group: "dist.ProcessGroup | None", minutes: float) -> None:
    """Sets the timeout of collectives of a connected group."""
    c10d = dist.distributed_c10d
    # Older than torch 2.13: the private name.
    set_group_timeout = c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout
    set_group_timeout(datetime.timedelta(minutes=minutes), group)


# NCCL's other errors are this rank's own, such as too little shared memory.
PEER_FAILURE_SIGNS = (
    "gloo",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "remote process exited",
    "Connection closed",
    "Connection reset",
)
JOIN_FAILURE_SIGNS = (
    *PEER_FAILURE_SIGNS,
    "Timed out",
    "timed out",
    "wait timeout",
    "failed to recv",
    "Broken pipe",
)


@contextlib.contextmanager
def translate_peer_failure(while_joining: bool = False) -> Iterator[None]:
    """Turns torch's error about another process into a RankFailure. `while_joining`: also those of
    its store.
    """
    try:
        yield
    except RuntimeError as error:
        signs = JOIN_FAILURE_SIGNS if while_joining else PEER_FAILURE_SIGNS
        if not isinstance(error, dist.DistNetworkError) and not any(
            sign in str(error) for sign in signs
        ):
            raise
        if "Timed out" in str(error) and not while_joining:
            raise RankFailure(
                "another rank did not answer within --collective-timeout-minutes: see what it "
                "prints, and whether its machine can be reached"
            ) from error
        raise RankFailure(
            "another rank failed, so this one stops: see that rank's error"
        ) from error


@contextlib.contextmanager
def init_distributed(
    device: torch.device,
    join_minutes: float = JOIN_MINUTES,
    collective_minutes: float = COLLECTIVE_MINUTES,
) -> Iterator[DistributedContext]:
    """Joins the process group of torchrun's environment, and destroys it on exit. Raises UserError
    if a rank does not join within `join_minutes`, or if a collective takes longer than
    `collective_minutes`.
    """
    place = read_environment()
    if place.world_size == 1:
        yield DistributedContext()
        return
    # With CPU offload, the tensors of some collectives are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = None
    try:
        store = join(place, join_minutes)
        with translate_peer_failure(while_joining=True):
            # The short timeout is for a process that ends before all are connected.
            dist.init_process_group(
                backend,
                rank=place.rank,
                world_size=place.world_size,
                store=dist.PrefixStore("group", store),
                timeout=datetime.timedelta(minutes=join_minutes),
            )
        set_timeout(dist.group.WORLD, collective_minutes)
        context = DistributedContext(
            **vars(place), join_minutes=join_minutes, collective_minutes=collective_minutes
        )
        context.cpu_group = context.connect_group(None, "gloo")
        with translate_peer_failure():
            yield context
        # None leaves with success while another may fail, or may need torchrun to wait for it.
        context.barrier()
        context.destroy()
    except BaseException as error:
        if isinstance(error, UserError):
            error.rank = place.rank  # from here on, the ranks may have errors of their own
        if store is None:
            raise
        end_process(error, dist.PrefixStore("errors", store), place)


def end_process(error: BaseException, store: "dist.Store", place: RankEnvironment) -> NoReturn:
    """Ends this process after an error, without destroying its process groups: NCCL would wait for
    ranks that never do so, before the error is printed and the other ranks notice the end of this
    one. Only the first process reports a UserError: those of the others are the same or follow from
    it.
    """
    is_user_error = isinstance(error, UserError)
    reported = error
    deadline = time.monotonic() + PEERS_TIMEOUT
    # The store fails if its process was killed, which then reported nothing. Torch prints frames.
    with contextlib.suppress(RuntimeError), no_stderr():
        if is_user_error and (isinstance(error, PeerError) or store.add("reports", 1) > 1):
            reported = PeerError(str(error))
    code = report_error(reported)
    if isinstance(error, RankFailure):
        code = restart_code(2)
    # Without torchrun, the main process has the store: others may need it.
    if is_user_error:
        with contextlib.suppress(RuntimeError), no_stderr():
            count = store.add("errors", 1)
            while place.rank == 0 and count < place.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                count = store.add("errors", 0)
    for process in multiprocessing.active_children():
        process.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
