#!/usr/bin/env bash
# Runs a command, or a shell, in the container that build.sh makes:
#
#   bash scripts/docker/launch.sh [CMD] [GPUS] [NETWORK]
#
# CMD [bash] is one word for the shell: 'bash scripts/run_pretraining.sh 32'. GPUS [all] is all, none, or numbers with
# commas, as 0,1. NETWORK [host] is docker's --network.
#
# The checkout is mounted at /workspace/bert, RESULTS_DIR [results] at /results and BERT_PREP_WORKING_DIR [data] at
# /data, under which the scripts in the container find them.
# Compiled kernels are kept in /results/.inductor_cache. The container runs as the calling user. IMAGE [bert] is its
# name. The scripts' other variables, and those of NCCL, gloo and PyTorch, are passed on.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
  exit
fi
(($# <= 3)) || fail "$# arguments given, but launch.sh takes CMD, GPUS and NETWORK: put the command in quotes"
command=${1:-bash}
gpus=${2:-all}
network=${3:-host}
case $gpus in
  all) gpu_flags=(--gpus all) ;;
  none) gpu_flags=() ;;
  *)
    [[ $gpus =~ ^[0-9]+(,[0-9]+)*$ ]] ||
      fail "argument 2 (GPUS) is '$gpus': expected all, none or numbers as 0,1 (put the command in quotes)"
    gpu_flags=(--gpus "\"device=$gpus\"") # docker needs the inner quotes where there are commas
    ;;
esac

results=${RESULTS_DIR:-$root/results}
data=${BERT_PREP_WORKING_DIR:-$root/data}
for variable in RESULTS_DIR:"$results" BERT_PREP_WORKING_DIR:"$data"; do
  path=${variable#*:}
  mkdir -p -- "$path" 2>/dev/null && [[ -w $path ]] || # docker would make a missing folder as root's
    fail "the folder $path cannot be written: set ${variable%%:*} to one that can"
done

[[ ${SLURM_STEP_NUM_NODES:-1} == 1 || -n ${NNODES:-} ]] ||
  fail 'srun starts this on several nodes: give NNODES, NODE_RANK and MASTER_ADDR, or use run.sub with CONTAINER_IMAGE'
passed_on=()
for name in $(compgen -e); do
  case $name in
    NCCL_* | GLOO_* | TORCH_* | PHASE | EXTRA_ARGS | DATA_ARGS | TASK_ARGS | TASK_FILE | OBJECTIVE | DOCTOR | BERT_MODEL | \
      VOCAB_FILE | EVAL_DIR_PHASE[12] | SQUAD_VERSION | NNODES | NODE_RANK | RDZV_ENDPOINT | MASTER_ADDR | MASTER_PORT)
      passed_on+=(--env "$name")
      ;;
  esac
done
[[ ! -d /dev/infiniband ]] || passed_on+=(--device /dev/infiniband)

terminal=()
if [[ -t 0 && -t 1 ]]; then
  terminal=(--interactive --tty)
fi
# PyTorch's worker processes and NCCL need more shared memory than docker's default of 64 MiB.
exec docker run --rm "${terminal[@]}" "${gpu_flags[@]}" --network "$network" --ipc host --ulimit memlock=-1 \
  --ulimit stack=67108864 --user "$(id -u):$(id -g)" --volume "$root:/workspace/bert" \
  --volume "$(realpath -- "$results"):/results" --volume "$(realpath -- "$data"):/data" --env RESULTS_DIR=/results \
  --env BERT_PREP_WORKING_DIR=/data --env TORCHINDUCTOR_CACHE_DIR=/results/.inductor_cache --workdir /workspace/bert \
  "${passed_on[@]}" "${IMAGE:-bert}" bash -c "$command"
