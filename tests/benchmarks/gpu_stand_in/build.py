"""Builds the stand-in for a GPU's driver. It needs PyTorch's CUDA build with Triton, gcc and nm."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("driver.c")
CUDA_FUNCTION = re.compile(r"\bcu(?:da|blas|blasLt)[A-Z]\w*")


def missing() -> str:
    """Why the stand-in cannot be built here; empty if it can."""
    if torch.version.cuda is None:
        return "needs PyTorch's CUDA build, such as `pip install torch` installs it on Linux"
    return "needs gcc and nm" if None in map(shutil.which, ("gcc", "nm")) else ""


def output(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True
    ).stdout


def wanted(libraries: Path, includes: list[str]) -> Iterator[str]:
    """The functions that PyTorch calls, and the driver's, which Triton looks up by name."""
    for name in ("torch_cuda", "c10_cuda", "torch_python"):
        yield from CUDA_FUNCTION.findall(
            output("nm", "-D", "--undefined-only", libraries / f"lib{name}.so")
        )
    header = output("gcc", "-w", "-E", *includes, "-include", "cuda.h", "-x", "c", "/dev/null")
    yield from re.findall(r"\b(cu[A-Z]\w+) *\(", header)


def build(folder: Path) -> dict[str, str]:
    """Builds the library in `folder`; returns the environment of programs that use it."""
    packages = Path(torch.__file__).parents[1]
    # The headers beside PyTorch are of its CUDA and not complete: Triton has the rest.
    headers = [*packages.glob("nvidia/cu*/include"), packages / "triton/backends/nvidia/include"]
    includes = [f"-I{path}" for path in headers]
    library = folder / "libcuda.so.1"
    rest = folder / "rest.c"
    output("gcc", "-w", "-c", "-fPIC", *includes, SOURCE, "-o", folder / "driver.o")
    defined = {
        line.split()[-1]
        for line in output("nm", "--defined-only", folder / "driver.o").splitlines()
    }
    others = sorted({*wanted(Path(torch.__file__).parent / "lib", includes)} - defined)
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
    name = "-Wl,-soname,libcuda.so.1"
    output("gcc", "-w", "-shared", "-fPIC", name, folder / "driver.o", rest, "-ldl", "-o", library)
    (folder / "libcuda.so").symlink_to(library)
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
    }
