#!/usr/bin/env bash
# Runs a program of this project on a GPU that is not there:
#
#   bash benchmarks/dry_gpu/run.sh benchmarks/step_floor.py --model large --batch-size 256 --no-time-kernels \
#     --gigabytes-per-second 3000 --tflops 798
#
# Needs PyTorch's CUDA build with Triton, gcc and binutils, and no GPU or driver. The CUDA runtime, its driver and
# cuBLAS are replaced by functions that succeed and compute nothing (cuda_stub.c), so whatever a kernel would have
# computed is what happened to be in memory. What is real: all code on the host and its time, the checks of shapes,
# types and devices, and everything that torch.compile makes, down to the machine code for an H100. Not for: cuDNN,
# NCCL, profilers, and results.
set -euo pipefail
if [[ $# -eq 0 || $1 == --help || $1 == -h ]]; then
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
find_libraries='import torch; torch.version.cuda.split(); print(torch.__path__[0] + "/lib")'
if ! libraries=$(python3 -c "$find_libraries" 2>/dev/null); then
  echo "error: python3's torch is not a CUDA build: install one, for instance from PyPI on Linux" >&2
  exit 2
fi
# The headers beside torch are of its CUDA and not complete: Triton or a toolkit have the rest.
headers=("$libraries"/../../nvidia/cu*/include "$libraries/../../triton/backends/nvidia/include")
includes=("${headers[@]/#/-I}" "-I${CUDA_HOME:-/usr/local/cuda}/include")

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  for library in torch_cuda c10_cuda torch_python; do
    nm -D --undefined-only "$libraries/lib$library.so" | grep -oE '\bcu(da|blas|blasLt)[A-Z]\w*'
  done
  gcc -w -E "${includes[@]}" -include cuda.h -x c /dev/null | grep -oE '\bcu[A-Z]\w+ *\(' | tr -d ' ('
} | sort -u >"$folder/wanted"
gcc -w -c -fPIC "${includes[@]}" "$here/cuda_stub.c" -o "$folder/stub.o"
nm --defined-only "$folder/stub.o" | awk '{print $3}' | sort -u >"$folder/defined"
comm -23 "$folder/wanted" "$folder/defined" | sed 's/.*/int &(void) { return 0; }/' >"$folder/rest.c"
gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 "$folder/stub.o" "$folder/rest.c" -ldl -o "$folder/libcuda.so.1"
ln -s libcuda.so.1 "$folder/libcuda.so"

export TRITON_LIBCUDA_PATH=$folder LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_COMPILE_THREADS=1
LD_PRELOAD=$folder/libcuda.so.1 python3 "$@"
