#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # the arguments are declared by their table, which common.sh reads
#
# Pre-trains BERT in two phases, length 128 and then 512. Rerun after any stop, the same command goes on where it was.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

data=${BERT_PREP_WORKING_DIR:-$root/data}/hdf5
ARGUMENTS=(
  # name                              | default  | kind          | help
  "train_batch_size                   | 256      | count         | sequences a GPU and micro-batch, phase 1"
  "learning_rate                      | 6e-3     | number        | peak learning rate, phase 1"
  "precision                          | amp      | amp,fp32,tf32 | amp computes in bfloat16"
  "num_gpus                           | 8        | whole         | on this node; 0: run on the CPU"
  "warmup_proportion                  | 0.2843   | fraction      | share of train_steps that warms up, phase 1"
  "train_steps                        | 7038     | count         | updates of phase 1"
  "save_checkpoint_steps              | 200      | count         | updates between checkpoints"
  "create_logfile                     | false    | true,false    | copy the output to a file in RESULTS_DIR"
  "gradient_accumulation_steps        | 32       | count         | micro-batches an update, phase 1"
  "seed                               | 12439    | whole         | of weights, dropout and sample order"
  "job_name                           | bert_lamb_pretraining | text          | the log file's name begins with it"
  "train_batch_size_phase2            | 32       | count         | sequences a GPU and micro-batch, phase 2"
  "learning_rate_phase2               | 4e-3     | number        | peak learning rate, phase 2"
  "warmup_proportion_phase2           | 0.128    | fraction      | share of train_steps_phase2 that warms up"
  "train_steps_phase2                 | 1563     | count         | updates of phase 2"
  "gradient_accumulation_steps_phase2 | 128      | count         | micro-batches an update, phase 2"
  "dataset_dir_phase1                 | $data/seq_128_pred_20/training | text          | HDF5 shards, length 128, 20 predictions"
  "dataset_dir_phase2                 | $data/seq_512_pred_80/training | text          | HDF5 shards, length 512, 80 predictions"
  "code_dir                           | $root    | text          | where run_pretraining.py is"
  "init_checkpoint_dir                | None     | text          | model folder whose weights phase 1 starts from"
  "bert_config_file                   | None     | text          | architecture; None: that of BERT_MODEL"
  "enable_benchmark                   | false    | true,false    | measure the speed of both phases, save nothing"
  "benchmark_steps                    | 10       | count         | updates to measure"
  "benchmark_warmup_steps             | 10       | count         | updates before those"
)

print_help() {
  echo "usage: bash scripts/run_pretraining.sh [ARGUMENT...]
   or: bash scripts/run_pretraining.sh \$(source scripts/configs/pretrain_config.sh && PRESET)

Pre-trains BERT in two phases. Arguments go by position; one left out or empty takes its [default]:"
  print_arguments
  cat <<'HELP'

Environment:
  RESULTS_DIR           checkpoints and logs go to RESULTS_DIR/BERT_MODEL/<phase>/<step> [code_dir/results]
  BERT_MODEL            architecture's name [bert-large-uncased; custom where bert_config_file is given]
  VOCAB_FILE            vocabulary that the shards were made with [code_dir/vocab/BERT_MODEL-vocab.txt]
  EVAL_DIR_PHASE1, EVAL_DIR_PHASE2
                        held-out shards; their losses are logged at the end, or every --eval-steps of EXTRA_ARGS
  EXTRA_ARGS            more flags for run_pretraining.py, such as "--log-freq 1"
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                        several nodes, with the script started once on each; Slurm's srun sets them itself
HELP
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
parse_arguments "$@"

# run_phase PHASE MAX_STEPS FLAG...: trains one phase to its last step, or exits.
run_phase() {
  local phase=$1 max_steps=$2 newest
  local steps_folder=$RESULTS_DIR/$BERT_MODEL/$phase
  if [[ $enable_benchmark == false && -d $steps_folder/$max_steps ]]; then
    echo "$phase is done: $steps_folder/$max_steps"
    return
  fi
  log_file=''
  if [[ $create_logfile == true ]]; then
    mkdir -p "$RESULTS_DIR"
    log_file=$RESULTS_DIR/$job_name.$phase.node$node_rank.$(date +%y%m%d%H%M%S).log
    echo "log file: $log_file"
  fi
  launch "$processes" "$code_dir/run_pretraining.py" "--$phase" --max-steps "$max_steps" "${@:3}" \
    --from-checkpoint "$steps_folder" --last-step-of-checkpoint auto \
    --report-file "$RESULTS_DIR/$BERT_MODEL/$phase-report.json" "${shared_flags[@]}"
  if [[ $enable_benchmark == false && ! -d $steps_folder/$max_steps ]]; then
    newest=$(find "$steps_folder" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1)
    echo "$phase stopped at step ${newest:-0} of $max_steps: run the same command again to go on"
    exit
  fi
}

if [[ $bert_config_file == None ]]; then
  BERT_MODEL=${BERT_MODEL:-bert-large-uncased}
  VOCAB_FILE=${VOCAB_FILE:-$code_dir/vocab/$BERT_MODEL-vocab.txt}
else
  require_file 'argument 21 (bert_config_file)' "$bert_config_file"
  BERT_MODEL=${BERT_MODEL:-custom}
  VOCAB_FILE=${VOCAB_FILE:-$code_dir/vocab/bert-base-uncased-vocab.txt}
fi
RESULTS_DIR=${RESULTS_DIR:-$code_dir/results}
require_file 'argument 19 (code_dir)' "$code_dir/run_pretraining.py"
require_folder 'argument 17 (dataset_dir_phase1)' "$dataset_dir_phase1"
require_folder 'argument 18 (dataset_dir_phase2)' "$dataset_dir_phase2"
require_file VOCAB_FILE "$VOCAB_FILE"
[[ $init_checkpoint_dir == None ]] || require_folder 'argument 20 (init_checkpoint_dir)' "$init_checkpoint_dir"
find_nodes
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
require_gpus "$num_gpus"

processes=$((num_gpus > 0 ? num_gpus : 1))
shared_flags=(
  --output-dir "$RESULTS_DIR" --bert-model "$BERT_MODEL" --vocab-file "$VOCAB_FILE" --config-file "$bert_config_file"
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --seed "$seed"
  --num-steps-per-checkpoint "$save_checkpoint_steps"
)
read -r -a precision_words <<<"$(precision_flags "$precision")"
read -r -a extra_words <<<"${EXTRA_ARGS:-}"
if [[ $enable_benchmark == true ]]; then
  shared_flags+=(--benchmark --benchmark-steps "$benchmark_steps" --benchmark-warmup-steps "$benchmark_warmup_steps")
fi
shared_flags+=("${precision_words[@]}" "${extra_words[@]}")

run_phase phase1 "$train_steps" --input-dir "$dataset_dir_phase1" --eval-dir "${EVAL_DIR_PHASE1:-None}" \
  --max-seq-length 128 --max-predictions-per-seq 20 \
  --batch-size "$train_batch_size" --gradient-merge-steps "$gradient_accumulation_steps" \
  --learning-rate "$learning_rate" --warmup-proportion "$warmup_proportion" \
  --from-pretrained-params "$init_checkpoint_dir"

phase1_weights=None # a benchmark starts from random ones
[[ $enable_benchmark == true ]] || phase1_weights=$RESULTS_DIR/$BERT_MODEL/phase1/$train_steps
run_phase phase2 "$train_steps_phase2" --input-dir "$dataset_dir_phase2" --eval-dir "${EVAL_DIR_PHASE2:-None}" \
  --max-seq-length 512 --max-predictions-per-seq 80 \
  --batch-size "$train_batch_size_phase2" --gradient-merge-steps "$gradient_accumulation_steps_phase2" \
  --learning-rate "$learning_rate_phase2" --warmup-proportion "$warmup_proportion_phase2" \
  --from-phase1-final-params "$phase1_weights"
