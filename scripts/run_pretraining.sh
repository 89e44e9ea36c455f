#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Pre-trains BERT in two phases, at sequence lengths 128 and 512. If interrupted, rerun to resume.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

ARGUMENTS=(
  # name                              | default                   | kind               | help
  "train_batch_size                   | 256                       | positive_int       | sequences per GPU and micro-batch, phase 1"
  "learning_rate                      | 6e-3                      | non_negative_float | peak learning rate, phase 1"
  "precision                          | amp                       | $PRECISIONS        | amp, bf16, fp16, tf32 or fp32: see below"
  "num_gpus                           | all                       | gpus               | GPUs of this node; 0: run on the CPU; all: see below"
  "warmup_proportion                  | 0.2843                    | fraction           | share of train_steps for the warmup, phase 1"
  "train_steps                        | 7038                      | positive_int       | updates of phase 1"
  "save_checkpoint_steps              | 200                       | positive_int       | updates between checkpoints"
  "create_logfile                     | false                     | true,false         | copy the output to a file in RESULTS_DIR"
  "gradient_accumulation_steps        | 32                        | positive_int       | micro-batches per update, phase 1"
  "seed                               | 12439                     | non_negative_int   | seed of weights, dropout and sample order"
  "job_name                           | bert_lamb_pretraining     | file_name          | start of the log file's name"
  "train_batch_size_phase2            | 32                        | positive_int       | sequences per GPU and micro-batch, phase 2"
  "learning_rate_phase2               | 4e-3                      | non_negative_float | peak learning rate, phase 2"
  "warmup_proportion_phase2           | 0.128                     | fraction           | share of train_steps_phase2 for the warmup"
  "train_steps_phase2                 | 1563                      | positive_int       | updates of phase 2"
  "gradient_accumulation_steps_phase2 | 128                       | positive_int       | micro-batches per update, phase 2"
  "dataset_dir_phase1                 | $(find_shards 128 20)     | text               | HDF5 shards, length 128, 20 predictions"
  "dataset_dir_phase2                 | $(find_shards 512 80)     | text               | HDF5 shards, length 512, 80 predictions"
  "code_dir                           | $root                     | text               | folder of run_pretraining.py"
  "init_checkpoint_dir                | None                      | text               | model folder to take the first phase's weights from"
  "bert_config_file                   | None                      | text               | architecture; None: that of BERT_MODEL"
  "enable_benchmark                   | false                     | true,false         | measure the speed of both phases, save nothing"
  "benchmark_steps                    | 10                        | positive_int       | updates to measure"
  "benchmark_warmup_steps             | 10                        | positive_int       | updates before the measured ones"
)
print_help() {
  echo "usage: bash scripts/run_pretraining.sh [ARGUMENT...]
   or: bash scripts/run_pretraining.sh \$(source scripts/configs/pretrain_config.sh && PRESET)

Pre-trains BERT in two phases. Arguments are positional; a missing or empty one, or None, takes its [default]:"
  print_arguments
  cat <<'HELP'

num_gpus: all are the GPUs of this node, or its CPU if there is none; the global batch is that of 8 GPUs. On a CPU, an omitted
precision is float32, or bfloat16 where that is faster.

precision: amp and bf16 compute in bfloat16, fp16 in float16 with dynamic loss scaling (NVIDIA's amp), tf32 in TF32,
fp32 in float32.

Environment:
  BERT_PREP_WORKING_DIR folder of the prepared data [data/ of the checkout]
  RESULTS_DIR           checkpoints go to RESULTS_DIR/BERT_MODEL/<phase>/<step>, reports to
                        RESULTS_DIR/dllogger_p1.json and dllogger_p2.json, and a page of these to
                        RESULTS_DIR/report.html [code_dir/results]
  PHASE                 1 or 2: only this phase; 2 starts from init_checkpoint_dir, if given [both phases]
  BERT_MODEL            architecture [that of bert_config_file or init_checkpoint_dir, else bert-large-uncased]
  VOCAB_FILE            vocabulary that the shards were made with
                        [that of init_checkpoint_dir, else code_dir/vocab/BERT_MODEL-vocab.txt]
  EVAL_DIR_PHASE1, EVAL_DIR_PHASE2
                        held-out shards, evaluated at the end, or every --eval-steps given in EXTRA_ARGS
  EXTRA_ARGS            more flags for run_pretraining.py, such as "--data-parallel-shard-degree -1"; words can be
                        quoted
HELP
  print_launch_variables
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
if [[ ${9:-} == true || ${9:-} == false ]]; then
  # NVIDIA's PyTorch recipe: 1 and 16 are batches per GPU and update, 8 is resume_training, 10 accumulate_gradients.
  if [[ ${16:-} == true || ${16:-} == false ]]; then # accumulate_into_fp16, in its README only
    set -- "${@:1:15}" "${@:17}"
  fi
  per_micro_batch() { is_valid positive_int "$1" && is_valid positive_int "$2" && echo $(($1 / $2)) || echo BATCH; }
  fail_with_command "argument 9 is '$9', as in NVIDIA's PyTorch recipe, which has another order" \
    "$(per_micro_batch "$1" "${11:-128}")" "${@:2:6}" "$9" "${11:-128}" "${12:-12439}" "${13:-bert_lamb_pretraining}" \
    "$(per_micro_batch "${16:-4096}" "${20:-512}")" "${17:-4e-3}" "${18:-0.128}" "${19:-1563}" "${20:-512}" \
    "$(existing "${21:-}")" "$(existing "${22:-}")" "$(existing "${23:-}")" "$(existing "${24:-}")" "$(config_here "${32:-}")"
fi
if (($# > 24 && $# <= 31)) || [[ -d ${21:-} || ${22:-} =~ ^[0-9]+$ ]]; then
  # NVIDIA's Paddle recipe: 21 to 27 are about LDDL's data, 28 to 31 are 21 to 24 here.
  fail_with_command "$# arguments, of which 21 to 27 make LDDL's data in NVIDIA's release 22.12; shards are HDF5 here" \
    "${@:1:16}" "$(existing "${17:-}")" "$(existing "${18:-}")" "${@:19:2}" "${@:28}"
fi
parse_arguments "$@"

# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
[[ $bert_config_file == None ]] || require_file 'argument 21 (bert_config_file)' "$bert_config_file"
if [[ -n ${BERT_MODEL:-} ]]; then
  model_flags=(--bert-model "$BERT_MODEL" --config-file "$bert_config_file")
elif [[ $bert_config_file != None ]]; then
  BERT_MODEL=$(model_name --config-file "$bert_config_file")
  model_flags=(--config-file "$bert_config_file")
elif [[ -f $init_checkpoint_dir/config.json ]]; then
  BERT_MODEL=$(model_name --init-checkpoint "$init_checkpoint_dir")
  model_flags=()
  for name in vocab.txt tokenizer.json; do
    [[ ! -f $init_checkpoint_dir/$name ]] || VOCAB_FILE=${VOCAB_FILE:-$init_checkpoint_dir/$name}
  done
  [[ -n ${VOCAB_FILE:-} ]] ||
    fail "argument 20 (init_checkpoint_dir): $init_checkpoint_dir has no tokenizer: copy it there, or set VOCAB_FILE"
else
  BERT_MODEL=bert-large-uncased
  model_flags=(--bert-model "$BERT_MODEL")
fi
if [[ -z ${VOCAB_FILE:-} ]]; then
  VOCAB_FILE=$code_dir/vocab/$BERT_MODEL-vocab.txt
  [[ -f $VOCAB_FILE ]] || VOCAB_FILE=$code_dir/vocab/bert-base-uncased-vocab.txt
fi
RESULTS_DIR=${RESULTS_DIR:-$code_dir/results}
PHASE=${PHASE:-both}
is_valid 1,2,both "$PHASE" || fail "PHASE is '$PHASE': expected 1, 2 or both"
require_file 'argument 19 (code_dir)' "$code_dir/run_pretraining.py"
[[ $PHASE == 2 ]] || require_folder 'argument 17 (dataset_dir_phase1)' "$dataset_dir_phase1" 'make it: docs/data.md'
[[ $PHASE == 1 ]] || require_folder 'argument 18 (dataset_dir_phase2)' "$dataset_dir_phase2" 'make it: docs/data.md'
require_file VOCAB_FILE "$VOCAB_FILE"
first_phase=phase$([[ $PHASE == 2 ]] && echo 2 || echo 1)
if [[ $(realpath -m "$init_checkpoint_dir") == "$(realpath -m "$RESULTS_DIR/$BERT_MODEL/$first_phase")" ]]; then
  init_checkpoint_dir=None # the run's own folder, as NVIDIA's recipe has it for resuming: that is done anyway
elif [[ $(realpath -m "$init_checkpoint_dir/..") == "$(realpath -m "$RESULTS_DIR/$BERT_MODEL/$first_phase")" ]]; then
  step=$(basename "$(realpath -m "$init_checkpoint_dir")") # a checkpoint in it: the newest one is resumed anyway
  newest=$(newest_step "$RESULTS_DIR/$BERT_MODEL/$first_phase")
  [[ $step == "$newest" ]] ||
    fail "argument 20 (init_checkpoint_dir) is step $step of this run, which is at step ${newest:-0}: give None to resume" \
      "from there, or move the newer checkpoints away"
  init_checkpoint_dir=None
fi
[[ $init_checkpoint_dir == None ]] || require_folder 'argument 20 (init_checkpoint_dir)' "$init_checkpoint_dir"
read_extra_args
only_estimates=$(has_word '--estimate[-_]memory*' && echo true || echo false)
! has_word --benchmark || enable_benchmark=true
find_nodes
find_gpus num_gpus 8

mapfile -t precision_words < <(precision_flags "$precision" 1048576)
shared_flags=(
  --output-dir "$RESULTS_DIR" "${model_flags[@]}" --vocab-file "$VOCAB_FILE"
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --seed "$seed"
  --num-steps-per-checkpoint "$save_checkpoint_steps" --log-freq=1 --optimizer=Lamb "${precision_words[@]}"
)
if [[ $enable_benchmark == true ]]; then
  shared_flags+=(--benchmark --benchmark-steps "$benchmark_steps" --benchmark-warmup-steps "$benchmark_warmup_steps")
fi
shared_flags+=("${extra_words[@]}")
report_at_exit "$RESULTS_DIR"

if [[ $PHASE == 1 ]] || { [[ $PHASE == both ]] && needs_phase1 'argument 6 (train_steps)' "$train_steps"; }; then
  run_phase phase1 "$train_steps" "$train_batch_size" "$gradient_accumulation_steps" \
    --input-dir "$dataset_dir_phase1" --eval-dir "${EVAL_DIR_PHASE1:-None}" \
    --max-seq-length 128 --max-predictions-per-seq 20 \
    --learning-rate "$learning_rate" --warmup-proportion "$warmup_proportion" \
    --from-pretrained-params "$init_checkpoint_dir"
fi
if [[ $PHASE != 1 ]]; then
  phase1_weights=$RESULTS_DIR/$BERT_MODEL/phase1/$train_steps
  [[ $PHASE == both || $init_checkpoint_dir == None ]] || phase1_weights=$init_checkpoint_dir
  # A benchmark and an estimate need no phase 1.
  [[ $enable_benchmark == false && $only_estimates == false ]] || phase1_weights=$init_checkpoint_dir
  if [[ -n ${DOCTOR:-} && $PHASE == both && ! -d $phase1_weights ]]; then # phase 1 will make them
    phase1_weights=$init_checkpoint_dir
  fi
  run_phase phase2 "$train_steps_phase2" "$train_batch_size_phase2" "$gradient_accumulation_steps_phase2" \
    --input-dir "$dataset_dir_phase2" --eval-dir "${EVAL_DIR_PHASE2:-None}" \
    --max-seq-length 512 --max-predictions-per-seq 80 \
    --learning-rate "$learning_rate_phase2" --warmup-proportion "$warmup_proportion_phase2" \
    --from-phase1-final-params "$phase1_weights"
fi
