"""What the Triton kernels that torch.compile made for the stand-in take of a GPU."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of a block, in bytes, by compute capability


class Resources(NamedTuple):
    """Registers of a thread, bytes that it has in memory because registers are missing, shared memory of a block."""

    registers: int
    stack: int
    shared: int


def kernels(cache: Path, capability: int) -> Iterator[Resources]:
    """Of each kernel in Triton's `cache`, compiled again if it was not made for this compute capability."""
    for path in sorted(cache.glob("*/*.ttir")):
        made, cubin = json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".cubin")
        shared = made["shared"]
        if made["target"]["arch"] != capability:
            options = {name: made[name] for name in ("num_warps", "num_stages")}
            kernel = triton.compile(str(path), target=GPUTarget("cuda", capability, 32), options=options)
            shared, cubin = kernel.metadata.shared, cache / "other.cubin"
            cubin.write_bytes(kernel.asm["cubin"])
        printed = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        yield Resources(*(int(re.search(rf"{what}:(\d+)", printed)[1]) for what in ("REG", "STACK")), shared)
