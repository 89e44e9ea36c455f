#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # the arguments are declared by their table, which common.sh reads
#
# Fine-tunes BERT on SQuAD, answers the development set's questions and scores the answers.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

squad=$root/data/download/squad
ARGUMENTS=(
  # name                  | default        | kind          | help
  "init_checkpoint        | required       | text          | model folder to start from, or folder of steps"
  "epochs                 | 2              | number        | times through the training set"
  "batch_size             | 32             | count         | sequences a GPU"
  "learning_rate          | 4.6e-5         | number        | peak learning rate"
  "warmup_proportion      | 0.2            | fraction      | share of the steps that warms up"
  "precision              | amp            | amp,fp32,tf32 | amp computes in bfloat16"
  "num_gpus               | 8              | whole         | on this node; 0: run on the CPU"
  "seed                   | 1              | whole         | of the span head, dropout and sample order"
  "squad_dir              | $squad/v1.1    | text          | folder of train-v*.json and dev-v*.json"
  "vocab_file             | $root/vocab/bert-large-uncased-vocab.txt | text          | the model's vocabulary"
  "OUT_DIR                | ./results      | text          | results go to OUT_DIR/BERT_MODEL/squad"
  "mode                   | train_eval     | train,eval,prediction,train_eval | 'train eval' is train_eval"
  "config_file            | None           | text          | architecture; None: that of BERT_MODEL"
  "max_steps              | -1             | integer       | updates at most; -1: as many as the epochs need"
  "enable_benchmark       | false          | true,false    | measure the speed, save nothing"
  "benchmark_steps        | 100            | count         | updates or batches to measure"
  "benchmark_warmup_steps | 100            | count         | updates or batches before those"
)

print_help() {
  echo "usage: bash scripts/run_squad.sh INIT_CHECKPOINT [ARGUMENT...]
   or: bash scripts/run_squad.sh \$(source scripts/configs/squad_config.sh && PRESET)

Fine-tunes and evaluates BERT on SQuAD. Arguments go by position; one left out or empty takes its [default]:"
  print_arguments
  cat <<'HELP'

Environment:
  BERT_MODEL            architecture's name [bert-large-uncased; custom where config_file is given]
  SQUAD_VERSION         1.1 or 2.0 [1.1 where squad_dir has it]
  EXTRA_ARGS            more flags for run_squad.py, such as "--optimizer Lamb --max-seq-length 256"
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                        several nodes, with the script started once on each; Slurm's srun sets them itself
HELP
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
if (($# >= 12)); then
  set -- "${@:1:11}" "${12/ /_}" "${@:13}"
fi
parse_arguments "$@"

if [[ $config_file == None ]]; then
  BERT_MODEL=${BERT_MODEL:-bert-large-uncased}
else
  require_file 'argument 13 (config_file)' "$config_file"
  BERT_MODEL=${BERT_MODEL:-custom}
fi
require_folder 'argument 1 (init_checkpoint)' "$init_checkpoint"
require_folder 'argument 9 (squad_dir)' "$squad_dir"
require_file 'argument 10 (vocab_file)' "$vocab_file"
if [[ -z ${SQUAD_VERSION:-} ]]; then
  SQUAD_VERSION=$([[ -f $squad_dir/dev-v1.1.json ]] && echo 1.1 || echo 2.0)
fi

flags=(
  --bert-model "$BERT_MODEL" --config-file "$config_file" --vocab-file "$vocab_file"
  --init-checkpoint "$init_checkpoint"
  --output-dir "$OUT_DIR" --report-file "$OUT_DIR/$BERT_MODEL/squad-report.json" --seed "$seed"
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)"
)
if [[ $mode == *train* ]]; then
  require_file 'argument 9 (squad_dir)' "$squad_dir/train-v$SQUAD_VERSION.json"
  flags+=(
    --do-train --train-file "$squad_dir/train-v$SQUAD_VERSION.json" --epochs "$epochs" --max-steps "$max_steps"
    --train-batch-size "$batch_size" --learning-rate "$learning_rate" --warmup-proportion "$warmup_proportion"
    --from-checkpoint "$OUT_DIR/$BERT_MODEL/squad" --last-step-of-checkpoint auto
  )
fi
if [[ $mode != train ]]; then
  require_file 'argument 9 (squad_dir)' "$squad_dir/dev-v$SQUAD_VERSION.json"
  flags+=(--predict-file "$squad_dir/dev-v$SQUAD_VERSION.json")
fi
case $mode in
  prediction) flags+=(--do-predict) ;;
  eval | train_eval) flags+=(--do-eval) ;;
esac
case $SQUAD_VERSION in
  1.1) ;;
  2.0) flags+=(--version-2-with-negative) ;;
  *) fail "SQUAD_VERSION is '$SQUAD_VERSION', not one of 1.1, 2.0" ;;
esac
if [[ $enable_benchmark == true ]]; then
  flags+=(--benchmark --benchmark-steps "$benchmark_steps" --benchmark-warmup-steps "$benchmark_warmup_steps")
fi
read -r -a precision_words <<<"$(precision_flags "$precision")"
read -r -a extra_words <<<"${EXTRA_ARGS:-}"

find_nodes
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
require_gpus "$num_gpus"
log_file=''
launch $((num_gpus > 0 ? num_gpus : 1)) "$root/run_squad.py" "${flags[@]}" "${precision_words[@]}" "${extra_words[@]}"
