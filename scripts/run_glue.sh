#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Fine-tunes BERT on a task of GLUE or SuperGLUE, scores it on the development set, and writes submission files.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

TASKS=cola,sst-2,mrpc,sts-b,qqp,mnli,qnli,rte,wnli,boolq,cb,wic,superglue-rte
MODES=train,eval,prediction,train_eval,eval_prediction,train_eval_prediction
task=${6:-None}
task=${task/#None/mrpc}
benchmark=glue
case ${task,,} in
  boolq) folder=BoolQ benchmark=superglue ;;
  wic) folder=WiC benchmark=superglue ;;
  cb) folder=CB benchmark=superglue ;;
  superglue-rte) folder=RTE benchmark=superglue ;;
  cola) folder=CoLA ;;
  *) folder=${task^^} ;;
esac
ARGUMENTS=(
  # name                        | default                        | kind               | help
  "init_checkpoint              | $results_dir/${BERT_MODEL:-bert-large-uncased}/phase2 | text               | model folder to start from, or folder of steps"
  "data_dir                     | $data_dir/download/$benchmark/$folder | text               | folder of the task's files, as distributed"
  "vocab_file                   | None                           | text               | vocabulary; None: that of init_checkpoint or BERT_MODEL"
  "config_file                  | None                           | text               | architecture; None: that of init_checkpoint or BERT_MODEL"
  "out_dir                      | $results_dir/$folder           | text               | results go to OUT_DIR/MODEL/TASK"
  "task_name                    | mrpc                           | $TASKS             | task of GLUE or SuperGLUE (run_glue.py --help lists them)"
  "num_gpu                      | all                            | gpus               | GPUs of this node; 0: run on the CPU; all: see below"
  "batch_size                   | 16                             | positive_int       | sequences per GPU and update"
  "gradient_accumulation_steps  | 1                              | positive_int       | micro-batches that batch_size is divided into"
  "learning_rate                | 2.4e-5                         | non_negative_float | peak learning rate"
  "warmup_proportion            | 0.1                            | fraction           | share of the steps for the warmup"
  "epochs                       | 3                              | non_negative_float | passes over the training set"
  "max_steps                    | -1                             | int                | maximum updates; -1: as many as the epochs need"
  "precision                    | fp16                           | $PRECISIONS        | amp, bf16, fp16, tf32 or fp32: see below"
  "seed                         | 2                              | non_negative_int   | seed of the classifier, dropout and sample order"
  "mode                         | train_eval                     | $MODES             | train, eval, prediction, or these joined by _"
)

print_help() {
  echo "usage: bash scripts/run_glue.sh
   or: bash scripts/run_glue.sh INIT_CHECKPOINT [ARGUMENT...]
   or: bash scripts/run_glue.sh \$(source scripts/configs/glue_config.sh && PRESET)

Fine-tunes and evaluates BERT on a task. Arguments are positional; a missing or empty one, or None, takes its [default]:"
  print_arguments
  cat <<'HELP'

Without arguments, it downloads bert-base-uncased to the working folder (with the command hf) and MRPC if they are not
there, and uses the GPUs of this machine in fp16, or its CPU in fp32 (amp where that is faster).

num_gpu: all are the GPUs of this node, or its CPU if there is none; the global batch is that of 8 GPUs. On a CPU, an omitted
precision is float32, or bfloat16 where that is faster.

precision: amp and bf16 compute in bfloat16, fp16 in float16 with dynamic loss scaling (NVIDIA's amp), tf32 in TF32,
fp32 in float32.

The report is OUT_DIR/dllogger_<num_gpu>_<precision>.json, and OUT_DIR/report.html is a page of it. The output is also
appended to OUT_DIR/logfile.txt. If interrupted, rerun the same command to resume.

Environment:
  BERT_PREP_WORKING_DIR folder of the prepared data [data/ of the checkout]
  BERT_MODEL            architecture's name [that of config_file, else of init_checkpoint]
  EXTRA_ARGS            more flags for run_glue.py, such as "--num-seeds 5"; words can be quoted
HELP
  print_launch_variables
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
arguments=("$@")
if (($# == 0)); then
  # shellcheck source=setup_environment.sh
  source "$root/scripts/setup_environment.sh" use
  arguments=(bert-base-uncased '' '' '' '' '' "$( (nvidia-smi -L 2>/dev/null || true) | wc -l)")
fi
if [[ ${6:-None} != None ]]; then arguments[5]=${6,,}; fi
if (($# >= 13)); then arguments[12]=${13%.0}; fi # -1.0 in NVIDIA's script
if (($# >= 16)); then arguments[15]=${16// /_}; fi
parse_arguments "${arguments[@]}"

if (($# == 0)); then
  [[ -d $data_dir ]] || python3 "$root/data/prepare.py" download glue --tasks mrpc
  hf_download="hf download google-bert/bert-base-uncased --local-dir bert-base-uncased --include '*.[jst]*'"
  if [[ ! -d $init_checkpoint ]] && ! { command -v hf >/dev/null && eval "$hf_download"; }; then
    fail "the model $init_checkpoint is not here: pip install huggingface_hub, then $hf_download"
  fi
fi
require_folder 'argument 1 (init_checkpoint)' "$init_checkpoint"
require_folder 'argument 2 (data_dir)' "$data_dir" 'download it: bash data/create_datasets_from_start.sh glue'
if ((batch_size % gradient_accumulation_steps > 0)); then
  fail "argument 8 (batch_size) is $batch_size, which $gradient_accumulation_steps (gradient_accumulation_steps) does" \
    "not divide: change one of them"
fi
find_nodes
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpu 8

flags=(
  --task-name "$task_name" --data-dir "$data_dir" --init-checkpoint "$init_checkpoint" --output-dir "$out_dir"
  --report-file "$out_dir/dllogger_${num_gpu}_$precision.json" --seed "$seed"
  --device "$( ((num_gpu > 0)) && echo cuda || echo cpu)"
)
if [[ $config_file != None ]]; then
  require_file 'argument 4 (config_file)' "$config_file"
  flags+=(--config-file "$config_file")
fi
if [[ $vocab_file != None ]]; then
  require_file 'argument 3 (vocab_file)' "$vocab_file"
  flags+=(--vocab-file "$vocab_file")
fi
if [[ -n ${BERT_MODEL:-} ]]; then flags+=(--bert-model "$BERT_MODEL"); fi
if [[ $mode == *train* ]]; then
  flags+=(
    --do-train --epochs "$epochs" --max-steps "$max_steps" --learning-rate "$learning_rate"
    --warmup-proportion "$warmup_proportion" --train-batch-size $((batch_size / gradient_accumulation_steps))
    --resume-from-checkpoint
  )
  set_batch_flags $((batch_size / gradient_accumulation_steps)) "$gradient_accumulation_steps"
  flags+=("${batch_flags[@]}")
fi
if [[ $mode != train ]]; then flags+=(--predict-batch-size "$batch_size"); fi
if [[ $mode == *eval* ]]; then flags+=(--do-eval); fi
if [[ $mode == *prediction* ]]; then flags+=(--do-predict); fi
mapfile -t precision_words < <(precision_flags "$precision" 128)
read_extra_args

mkdir -p "$out_dir" || fail "argument 5 (out_dir): the folder $out_dir cannot be made: give a folder you can write to"
log_file=$out_dir/logfile.txt
report_at_exit "$out_dir"
((node_rank == 0)) || log_file=$out_dir/logfile.node$node_rank.txt
launch "$processes" "$root/run_glue.py" "${flags[@]}" --log-file "$log_file" "${precision_words[@]}" "${extra_words[@]}"
