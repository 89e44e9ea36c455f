#!/usr/bin/env bash
# shellcheck disable=SC2154 # common.sh sets the arguments from their table
#
# Fine-tunes a model on all tasks of GLUE that are there, with several seeds, and writes a table of the results.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

ARGUMENTS=(
  "init_checkpoint | required                   | text               | model folder to start from, or folder of steps"
  "tasks_dir       | $data_dir/download/glue    | text               | folder with the tasks' folders, such as CoLA and MNLI"
  "out_dir         | results/glue_suite         | text               | results go to OUT_DIR/TASK, the table to OUT_DIR/glue.md"
  "num_seeds       | 5                          | positive_int       | runs of each task"
  "chain           | true                       | true,false         | start RTE, MRPC and STS-B from the model fine-tuned on MNLI"
  "num_gpus        | all                        | gpus               | tasks side by side, one on each GPU; 0: run on the CPU"
  "batch_size      | 32                         | positive_int       | sequences per update"
  "learning_rate   | 2e-5                       | non_negative_float | peak learning rate"
  "epochs          | 3                          | non_negative_float | passes over the training set"
  "precision       | amp                        | $PRECISIONS        | as in run_glue.sh"
)
FOLDERS=(MNLI QQP QNLI SST-2 CoLA STS-B MRPC RTE) # the longest first
CHAINED=' sts-b mrpc rte '

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/run_glue_suite.sh INIT_CHECKPOINT [ARGUMENT...]

Arguments are positional; a missing or empty one takes its [default]:"
  print_arguments
  echo "
EXTRA_ARGS has more flags for run_glue.py. If interrupted, rerun the same command to resume. Each task's output is in
OUT_DIR/TASK.log."
  exit
fi
parse_arguments "$@"
[[ -z ${DOCTOR:-} ]] || fail 'DOCTOR is for one run: unset it here, and set it for run_glue.sh'
require_folder 'argument 1 (init_checkpoint)' "$init_checkpoint"
require_folder 'argument 2 (tasks_dir)' "$tasks_dir" 'download it: python3 data/prepare.py download glue'
read_extra_args
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpus 1
mapfile -t precision_words < <(precision_flags "$precision" 128)
mkdir -p "$out_dir" || fail "argument 3 (out_dir): the folder $out_dir cannot be made: give a folder you can write to"
model=$(realpath "$init_checkpoint")
if [[ -f $out_dir/model && $(<"$out_dir/model") != "$model" ]]; then
  fail "argument 3 (out_dir): $out_dir has the results of $(<"$out_dir/model"): give another folder"
fi
echo "$model" >"$out_dir/model"

run_task() { # folder
  local task=${1,,} start=$init_checkpoint
  if [[ $chain == true && $CHAINED == *" $task "* && -n $mnli ]]; then start=$mnli; fi
  local -a command=(
    "$root/run_glue.py" --task-name "$task" --data-dir "$tasks_dir/$1" --init-checkpoint "$start" --do-train --do-eval
    --output-dir "$out_dir/$task" --num-seeds "$num_seeds" --train-batch-size "$batch_size" --epochs "$epochs"
    --learning-rate "$learning_rate" --resume-from-checkpoint --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)"
    "${precision_words[@]}" "${extra_words[@]}"
  )
  local record=$out_dir/$task.done
  if [[ -f $record && $(<"$record") == "${command[*]}" ]] &&
    [[ -z $(find -L "$start" "$tasks_dir/$1" -type f -cnewer "$record" -print -quit) ]]; then # the model and the data
    echo "$task: done before"
    return
  fi
  echo "$task: from $start, log in $out_dir/$task.log"
  python3 "${command[@]}" >>"$out_dir/$task.log" 2>&1 &
  trap 'kill $! 2>/dev/null' TERM # it saves a checkpoint first
  wait $! || return
  echo "${command[*]}" >"$record"
}

# Runs the tasks, as many side by side as there are GPUs.
run_tasks() { # folder...
  local -A gpu_of=() task_of=()
  local -a free=(all)
  local folder finished failed='' pids
  if ((num_gpus > 0)); then mapfile -t free < <(seq 0 $((num_gpus - 1))); fi
  for folder in "$@" ''; do
    while ((${#gpu_of[@]} > 0)) && [[ ${#free[@]} == 0 || -z $folder ]]; do
      # Bash's `wait -n` gives no process if the last one ends while it looks for one; all have ended then.
      pids=("${!gpu_of[@]}")
      wait -n -p finished "${pids[@]}" || wait "${finished:=${pids[0]}}" || failed+=" ${task_of[$finished]}"
      free+=("${gpu_of[$finished]}")
      unset "gpu_of[$finished]"
    done
    if [[ -n $folder ]]; then
      (if ((num_gpus > 0)); then export CUDA_VISIBLE_DEVICES=${free[0]}; fi && run_task "$folder") &
      gpu_of[$!]=${free[0]} task_of[$!]=${folder,,}
      free=("${free[@]:1}")
    fi
  done
  [[ -z $failed ]] || fail "failed:$failed: see the logs in $out_dir, then rerun the same command to resume"
}

mnli='' first=() second=()
for folder in "${FOLDERS[@]}"; do
  if [[ ! -d $tasks_dir/$folder ]]; then
    echo "${folder,,}: left out, because $tasks_dir/$folder does not exist"
  elif [[ $chain == true && $CHAINED == *" ${folder,,} "* && -d $tasks_dir/MNLI ]]; then
    second+=("$folder")
  else
    first+=("$folder")
  fi
done
((${#first[@]} + ${#second[@]} > 0)) || fail "argument 2 (tasks_dir): $tasks_dir has none of ${FOLDERS[*]}: check the path"
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT # background jobs ignore Ctrl-C
trap 'exit 130' INT
trap 'exit 143' TERM
if ((${#first[@]} > 0)); then run_tasks "${first[@]}"; fi
if ((${#second[@]} > 0)); then
  mnli=$(find "$out_dir/mnli" -name '*_progress.json' | sort | head -n 1)
  mnli=${mnli%/*/*} # the folder of steps
  run_tasks "${second[@]}"
fi
checkout_python -m bert_recipe.reporting.glue_table "$out_dir"
