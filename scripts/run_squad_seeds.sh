#!/usr/bin/env bash
# Fine-tunes and evaluates on SQuAD with several seeds, and prints exact match and F1 with mean and standard deviation.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  cat <<'HELP'
usage: bash scripts/run_squad_seeds.sh SEEDS INIT_CHECKPOINT [ARGUMENT...]

SEEDS is a list of seeds, such as 0,1,2. The other arguments and the environment are those of scripts/run_squad.sh;
its argument 8 (seed) is ignored, and results go to OUT_DIR/seed_<seed>. If interrupted, rerun to resume.
HELP
  exit
fi
read_seeds "${1:-}"
export LAUNCHER_PID=$$ # the runs stop when this script has died
arguments=("${@:2}")
while ((${#arguments[@]} < 11)); do arguments+=(''); done
out_dir=${arguments[10]:-./results}
report=dllogger_${arguments[6]:-8}_${arguments[5]:-amp}.json
reports=()
for seed in "${seeds[@]}"; do
  arguments[7]=$seed
  arguments[10]=$out_dir/seed_$seed
  echo "== seed $seed"
  bash "$root/scripts/run_squad.sh" "${arguments[@]}"
  reports+=("$seed=$out_dir/seed_$seed/$report")
done
mode=${arguments[11]:-train_eval} enable_benchmark=${arguments[14]:-false}
[[ $mode == *eval && $enable_benchmark == false ]] || exit 0 # there are no scores
python3 "$root/scripts/seed_summary.py" exact_match,F1 "${reports[@]}"
