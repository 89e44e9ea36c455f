#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Fine-tunes a pre-LN BERT on SQuAD v1.1 with the positions and settings of DeepSpeed's script of this name.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

ARGUMENTS=(
  # name       | default   | kind               | help
  "num_gpus    | required  | non_negative_int   | GPUs of this node, a divisor of 24; 0: run on the CPU"
  "model_file  | required  | text               | model folder to start from, or folder of steps"
  "squad_dir   | required  | text               | folder of train-v1.1.json and dev-v1.1.json"
  "output_dir  | required  | text               | results go to output_dir/<model>/squad"
  "lr          | 0.00003   | non_negative_float | peak learning rate"
  "seed        | 12345     | non_negative_int   | seed of the span head, dropout and sample order"
  "master_port | None      | text               | port of the first process; None: a free one"
  "dropout     | 0.1       | fraction           | dropout of hidden states and attention"
)

print_help() {
  echo "usage: bash scripts/run_squad_deepspeed.sh NUM_GPUS MODEL_FILE SQUAD_DIR OUTPUT_DIR [ARGUMENT...]

Fine-tunes a pre-LN BERT on SQuAD v1.1 with the settings of DeepSpeed's BingBertSquad: global batch 24, two epochs,
float16 (float32 on a CPU), Adam without weight decay and without bias correction. Arguments are positional:"
  print_arguments
  cat <<'HELP'

Environment:
  DOCTOR                1: examine the run with doctor.py instead of starting it [unset]
  EXTRA_ARGS            more flags for run_squad.py, such as "--deepspeed --deepspeed_config FILE" (ZeRO stage 0 only,
                        as Adam without bias correction is a form of LAMB here); they override the script's own
HELP
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
parse_arguments "$@"
require_folder 'argument 2 (model_file)' "$model_file"
require_file 'argument 3 (squad_dir)' "$squad_dir/train-v1.1.json"
require_file 'argument 3 (squad_dir)' "$squad_dir/dev-v1.1.json"
processes=$((num_gpus > 0 ? num_gpus : 1))
((24 % processes == 0)) || fail "argument 1 (num_gpus) is $num_gpus: the global batch of 24 needs a divisor of it"
if [[ $master_port != None ]]; then
  is_valid positive_int "$master_port" || fail "argument 7 (master_port) is '$master_port': expected a port, or None"
  export MASTER_PORT=$master_port
fi
config=$model_file/config.json
[[ ! -f $config ]] || grep -qE 'bert_pre_layer_norm|"pre_layer_norm": *true' "$config" ||
  fail "argument 2 (model_file): $model_file is not a pre-LN BERT, which this recipe fine-tunes: use scripts/run_squad.sh"
read_extra_args
find_nodes
((nodes == 1)) || fail "NNODES is set: this recipe is for one node, unset it"
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpus 1

per_gpu=$((24 / processes))
accumulation=$((per_gpu >= 3 ? per_gpu / 3 : 1))
log_file=''
precision=()
((num_gpus == 0)) || precision=(--fp16) # float32 on CPUs: many have no 16-bit instructions
report_at_exit "$output_dir"
# Trust ratios between 1 and 1 make LAMB the Adam of DeepSpeed's config file, which has no bias correction.
launch "$processes" "$root/run_squad.py" \
  --init-checkpoint "$model_file" --output-dir "$output_dir" --report-file "$output_dir/dllogger_squad.json" \
  --do-train --train-file "$squad_dir/train-v1.1.json" --do-eval --predict-file "$squad_dir/dev-v1.1.json" \
  --resume-from-checkpoint --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --seed "$seed" \
  --train-batch-size $((per_gpu / accumulation)) --gradient-accumulation-steps "$accumulation" \
  --predict-batch-size 3 --epochs 2 --learning-rate "$lr" --warmup-proportion 0.1 \
  --optimizer Lamb --lamb-min-coeff 1 --lamb-max-coeff 1 --lamb-bias-correction false --epsilon 1e-8 \
  --weight-decay 0 "${precision[@]}" --pre-layer-norm --dropout "$dropout" "${extra_words[@]}"
