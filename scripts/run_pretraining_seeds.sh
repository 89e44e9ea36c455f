#!/usr/bin/env bash
# Pre-trains with several seeds, and prints the final loss of each phase with mean and standard deviation.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  cat <<'HELP'
usage: bash scripts/run_pretraining_seeds.sh SEEDS [ARGUMENT...]

SEEDS is a list of seeds, such as 0,1,2. The other arguments and the environment are those of
scripts/run_pretraining.sh; its argument 10 (seed) is ignored, and results go to RESULTS_DIR/seed_<seed>. After any
stop, rerun it to resume.
HELP
  exit
fi
read_seeds "${1:-}"
export LAUNCHER_PID=$$ # the runs stop when this script has died
arguments=("${@:2}")
while ((${#arguments[@]} < 10)); do arguments+=(''); done
results=${RESULTS_DIR:-$root/results}
for seed in "${seeds[@]}"; do
  arguments[9]=$seed
  echo "== seed $seed"
  RESULTS_DIR=$results/seed_$seed bash "$root/scripts/run_pretraining.sh" "${arguments[@]}"
done
for phase in 1 2; do
  [[ ${PHASE:-$phase} == "$phase" ]] || continue
  reports=()
  for seed in "${seeds[@]}"; do
    reports+=("$seed=$results/seed_$seed/dllogger_p$phase.json")
  done
  echo "phase $phase:"
  python3 "$root/scripts/seed_summary.py" loss "${reports[@]}"
done
