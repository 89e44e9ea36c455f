#!/usr/bin/env bash
# Starts the container that build.sh made, with the data and results of this checkout mounted:
#
#   bash scripts/docker/launch.sh                                     a shell in it
#   bash scripts/docker/launch.sh bash scripts/run_pretraining.sh ... a command in it
#
# DATA_DIR [data] holds what the data scripts download and make, RESULTS_DIR [results] the checkpoints. IMAGE [bert]
# is the container and GPUS [all] the GPUs that it sees (docker's --gpus).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
data=${DATA_DIR:-$root/data}
results=${RESULTS_DIR:-$root/results}

# docker would make missing folders itself, as root's
mkdir -p "$results" "$data"/{download,formatted,sharded,hdf5}
mounts=(--volume "$(realpath "$results"):/workspace/bert/results")
for folder in download formatted sharded hdf5; do
  mounts+=(--volume "$(realpath "$data/$folder"):/workspace/bert/data/$folder")
done
terminal=()
if [[ -t 0 && -t 1 ]]; then
  terminal=(--interactive --tty)
fi
# PyTorch's loader workers and NCCL share memory, which docker limits to 64 MiB otherwise.
exec docker run --rm "${terminal[@]}" --gpus "${GPUS:-all}" --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --user "$(id -u):$(id -g)" "${mounts[@]}" --workdir /workspace/bert "${IMAGE:-bert}" "${@:-bash}"
