#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Fine-tunes BERT on SQuAD, predicts the answers of the development set and scores them.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

pretrained=${BERT_MODEL:-bert-large-uncased} # of run_pretraining.sh
[[ ${13:-None} == None ]] || pretrained=$(basename -- "${13}" .json)
ARGUMENTS=(
  # name                  | default                        | kind               | help
  "init_checkpoint        | $results_dir/$pretrained/phase2 | text              | model folder to start from, or folder of steps"
  "epochs                 | 2                              | non_negative_float | passes over the training set"
  "batch_size             | 32                             | positive_int       | sequences per GPU, in training and prediction"
  "learning_rate          | 4.6e-5                         | non_negative_float | peak learning rate"
  "warmup_proportion      | 0.2                            | fraction           | share of the steps for the warmup"
  "precision              | amp                            | $PRECISIONS        | amp, bf16, fp16, tf32 or fp32: see below"
  "num_gpus               | all                            | gpus               | GPUs of this node; 0: run on the CPU; all: see below"
  "seed                   | 1                              | non_negative_int   | seed of the span head, dropout and sample order"
  "squad_dir              | $data_dir/download/squad/v1.1  | text               | folder of train-v*.json and dev-v*.json"
  "vocab_file             | None                           | text               | vocabulary; None: that of init_checkpoint"
  "OUT_DIR                | $results_dir                   | text               | results go to OUT_DIR/<model>/squad"
  "mode                   | train_eval                     | train,eval,prediction,train_eval | train, eval, prediction or train_eval"
  "config_file            | None                           | text               | architecture; None: that of init_checkpoint"
  "max_steps              | -1                             | int                | maximum updates; -1: as many as the epochs need"
  "enable_benchmark       | false                          | true,false         | measure the speed, save nothing"
  "benchmark_steps        | 100                            | positive_int       | updates or batches to measure"
  "benchmark_warmup_steps | 100                            | positive_int       | updates or batches before the measured ones"
)
if (($# == 18)); then
  TOO_MANY_ARGUMENTS_HINT="leave out argument 18 (fuse_mha) of NVIDIA's release 22.12: attention is always fused"
fi

print_help() {
  echo "usage: bash scripts/run_squad.sh INIT_CHECKPOINT [ARGUMENT...]
   or: bash scripts/run_squad.sh \$(source scripts/configs/squad_config.sh && PRESET)

Fine-tunes and evaluates BERT on SQuAD. Arguments are positional; a missing or empty one, or
None, takes its [default]:"
  print_arguments
  cat <<'HELP'

num_gpus: all are the GPUs of this node, or its CPU if there is none; the global batch is that of 8 GPUs. On a CPU, an omitted
precision is float32, or bfloat16 where that is faster.

precision: amp and bf16 compute in bfloat16, fp16 in float16 with dynamic loss scaling (NVIDIA's amp), tf32 in TF32,
fp32 in float32.

The report is OUT_DIR/dllogger_<num_gpus>_<precision>.json, and OUT_DIR/report.html is a page of it. The output is also
appended to OUT_DIR/logfile.txt.

Environment:
  BERT_PREP_WORKING_DIR folder of the prepared data [data/ of the checkout]
  RESULTS_DIR           folder of run_pretraining.sh's results [results]
  BERT_MODEL            architecture [that of config_file, else of init_checkpoint, else bert-large-uncased]
  SQUAD_VERSION         1.1 or 2.0 [1.1 if squad_dir has it, else 2.0]
  EXTRA_ARGS            more flags for run_squad.py, such as "--optimizer Lamb --max-seq-length 256"; words can be
                        quoted
HELP
  print_launch_variables
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
if (($# >= 12)); then
  set -- "${@:1:11}" "${12/ /_}" "${@:13}"
fi
if is_valid "$PRECISIONS" "${5:-}"; then # NVIDIA's PyTorch recipe has no argument for the warmup, whose default is 0.1
  (($# < 13)) || set -- "${@:1:12}" "${13%.0}"
  fail_with_command "argument 5 is '$5', as in NVIDIA's PyTorch recipe, which has another order" "${@:1:4}" 0.1 "${@:5:7}" \
    "$(config_here "${12:-}")" "${13:-}"
elif is_valid "$PRECISIONS" "${3:-}"; then # its release 19.04: batch_size, learning_rate, precision, num_gpus, checkpoint, epochs
  fail_with_command "argument 3 is '$3', as in NVIDIA's first PyTorch recipe, which has another order" \
    "${5:-INIT_CHECKPOINT}" "${6:-}" "$1" "$2" 0.1 "$3" "${4:-}"
fi
parse_arguments "$@"

require_folder 'argument 1 (init_checkpoint)' "$init_checkpoint" 'give the model folder to start from'
require_folder 'argument 9 (squad_dir)' "$squad_dir" 'download it: bash data/create_datasets_from_start.sh squad'
[[ $vocab_file == None ]] || require_file 'argument 10 (vocab_file)' "$vocab_file"
[[ $config_file == None ]] || require_file 'argument 13 (config_file)' "$config_file"
if [[ -z ${SQUAD_VERSION:-} ]]; then
  SQUAD_VERSION=$([[ -f $squad_dir/dev-v1.1.json ]] && echo 1.1 || echo 2.0)
fi
is_valid 1.1,2.0 "$SQUAD_VERSION" || fail "SQUAD_VERSION is '$SQUAD_VERSION': expected 1.1 or 2.0"
find_nodes
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpus 8

flags=(
  --init-checkpoint "$init_checkpoint" --config-file "$config_file" --vocab-file "$vocab_file"
  --output-dir "$OUT_DIR" --report-file "$OUT_DIR/dllogger_${num_gpus}_$precision.json" --seed "$seed"
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --log-freq=100
)
[[ -z ${BERT_MODEL:-} ]] || flags+=(--bert-model "$BERT_MODEL")
if [[ $mode == *train* ]]; then
  require_file 'argument 9 (squad_dir)' "$squad_dir/train-v$SQUAD_VERSION.json"
  flags+=(
    --do-train --train-file "$squad_dir/train-v$SQUAD_VERSION.json" --epochs "$epochs" --max-steps "$max_steps"
    --train-batch-size "$batch_size" --learning-rate "$learning_rate" --warmup-proportion "$warmup_proportion"
    --resume-from-checkpoint
  )
fi
if [[ $mode != train ]]; then
  require_file 'argument 9 (squad_dir)' "$squad_dir/dev-v$SQUAD_VERSION.json"
  flags+=(--predict-file "$squad_dir/dev-v$SQUAD_VERSION.json" --predict-batch-size "$batch_size")
fi
case $mode in
  prediction) flags+=(--do-predict) ;;
  eval | train_eval) flags+=(--do-eval) ;;
esac
if [[ $SQUAD_VERSION == 2.0 ]]; then
  flags+=(--version-2-with-negative)
fi
if [[ $enable_benchmark == true ]]; then
  flags+=(--benchmark --benchmark-steps "$benchmark_steps" --benchmark-warmup-steps "$benchmark_warmup_steps")
fi
mapfile -t precision_words < <(precision_flags "$precision" 128)
read_extra_args

mkdir -p "$OUT_DIR" || fail "argument 11 (OUT_DIR): the folder $OUT_DIR cannot be made: give a folder you can write to"
log_file=$OUT_DIR/logfile.txt
report_at_exit "$OUT_DIR"
((node_rank == 0)) || log_file=$OUT_DIR/logfile.node$node_rank.txt
if [[ $mode == *train* ]]; then
  set_batch_flags "$batch_size" 1
  flags+=("${batch_flags[@]}")
fi
launch "$processes" "$root/run_squad.py" "${flags[@]}" --log-file "$log_file" "${precision_words[@]}" "${extra_words[@]}"
