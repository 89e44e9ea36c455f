#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Continues the pre-training of a model on texts of a domain, with words of the domain in its vocabulary. A model of
# sentence embeddings is trained on neighbouring passages instead. If interrupted, rerun to resume.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

PRESETS=decayed_checkpoint,stable_checkpoint
OBJECTIVES=masked_words,neighbours
# Masked words may make a model of sentence embeddings worse. Its folder has a modules.json, or
# the folders of its steps have.
objective=masked_words
if [[ -d ${1:-} && -n $(find -H "$(as_path "$1")" -maxdepth 2 -name modules.json -print -quit) ]]; then objective=neighbours; fi
objective=${OBJECTIVE:-$objective}
if [[ $objective == neighbours ]]; then
  length=64 steps=500 batch=8 merged=1 save_steps=100
else
  length=512 steps=None batch=None merged=None save_steps=500
fi
ARGUMENTS=(
  # name                        | default            | kind               | help
  "init_checkpoint              | required           | text               | model folder to start from, or folder of steps"
  "corpus                       | required           | text               | texts: a file or a folder (docs/data.md)"
  "out_dir                      | required           | text               | folder for data and results, named after the domain"
  "new_words                    | 1000               | positive_int       | words of the domain to add to the vocabulary"
  "sequence_length              | $length            | positive_int       | tokens per sample or passage"
  "train_steps                  | $steps             | text               | updates; None: four passes over the texts, at most 5,000"
  "train_batch_size             | $batch             | text               | sequences, or pairs of passages, per micro-batch of a GPU; None: <= 32"
  "gradient_accumulation_steps  | $merged            | text               | micro-batches per update; None: of 256 sequences, fewer for little text"
  "learning_rate                | None               | text               | peak learning rate; None: that of the preset"
  "precision                    | amp                | $PRECISIONS        | as for run_pretraining.sh"
  "num_gpus                     | all                | gpus               | GPUs of this machine, or its CPU; 0: run on the CPU"
  "preset                       | decayed_checkpoint | $PRESETS | optimizer and schedule, of scripts/configs/continue_config.sh"
  "save_checkpoint_steps        | $save_steps        | positive_int       | updates between checkpoints and between evaluations"
  "seed                         | 42                 | non_negative_int   | seed of new weights, dropout, masks and sample order"
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/continue_pretraining.sh INIT_CHECKPOINT CORPUS OUT_DIR [ARGUMENT...]

Adds words of the texts to the model's vocabulary, makes samples, a twentieth of the texts held out, and pre-trains with
masked language modelling. Evaluations are on at most 1,000 held-out samples. The model is named after INIT_CHECKPOINT and
OUT_DIR.

A model of sentence embeddings (with a modules.json) is trained to find the passage that follows a passage of some
sentences: 500 updates of 8 pairs of 64 tokens, rate 5e-5, checkpoints every 100. Arguments 4 and 12 stay empty.

Arguments are positional; a missing or empty one takes its [default]:"
  print_arguments
  echo '
Results: OUT_DIR/vocab/MODEL is the model with the new words before training, OUT_DIR/results/MODEL/phase1/STEP after, or
OUT_DIR/results/MODEL/embedding/best of sentence embeddings. OUT_DIR/results/report.html is a page with the losses or scores
on training and held-out text.

Environment:
  OBJECTIVE   masked_words or neighbours [neighbours for a model of sentence embeddings]
  DATA_ARGS   more flags for data/prepare.py all (format, for neighbours), such as "--empty-line document"; words can be
              quoted
  EXTRA_ARGS  more flags for run_pretraining.py, such as "--whole-word-mask" (run_embeddings.py, for neighbours)
  TASK_FILE   a table of labelled texts: at the end, the models before and after are compared on it, by a logistic
              regression on their vectors and fine-tuned on four fifths of it, and the differences of their scores on the
              rest are printed with intervals (OUT_DIR/task/comparison.txt)
  TASK_ARGS   flags of run_glue.py for TASK_FILE, such as "--text-column review --label-column stars"
  DOCTOR      1: make the data, and examine the run with doctor.py instead of starting it [unset]'
  exit
fi
parse_arguments "$@"
[[ -z ${BERT_MODEL:-} ]] || fail 'BERT_MODEL is for run_pretraining.sh: unset it; argument 1 is the model'
[[ -z ${PHASE:-} ]] || fail 'PHASE is for run_pretraining.sh: unset it; there is one phase here'
[[ -z ${RESULTS_DIR:-} ]] || fail 'RESULTS_DIR is for run_pretraining.sh: unset it; argument 3 is the folder'
[[ $learning_rate == None ]] || is_valid non_negative_float "$learning_rate" ||
  fail "argument 9 (learning_rate) is '$learning_rate': expected $(describe_kind non_negative_float)"
is_valid "$OBJECTIVES" "$objective" || fail "OBJECTIVE is '$objective': expected $(describe_kind "$OBJECTIVES")"
position=6
for name in train_steps train_batch_size gradient_accumulation_steps; do
  [[ ${!name} == None && $objective == masked_words ]] || is_valid positive_int "${!name}" ||
    fail "argument $position ($name) is '${!name}': expected $(describe_kind positive_int)"
  position=$((position + 1))
done
for position in 4 12; do
  [[ $objective == masked_words || ${!position:-None} == None ]] ||
    fail "argument $position is for masked words, and this run is for sentence embeddings: leave it empty (see --help)"
done
require_folder 'argument 1 (init_checkpoint)' "$init_checkpoint"
[[ -e $corpus ]] || fail "argument 2 (corpus): $corpus does not exist: check the path"
read_extra_args DATA_ARGS
data_words=("${extra_words[@]}")
read_extra_args TASK_ARGS
task_words=("${extra_words[@]}")
task_file=${TASK_FILE:-}
[[ -z $task_file ]] || require_file TASK_FILE "$task_file"
[[ -n $task_file || ${#task_words[@]} == 0 ]] || fail 'TASK_ARGS has flags for TASK_FILE, which is not set: set it'
read_extra_args
only_estimates=$(has_word '--estimate[-_]memory*' && echo true || echo false)
find_nodes
((nodes == 1)) || fail "NNODES is $nodes: this script is for one machine; docs/continue_pretraining.md has its commands"
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
base=$(model_name --init-checkpoint "$init_checkpoint")
most_gpus=$([[ $objective != neighbours ]] || echo 1) # pairs of passages are compared within a GPU
find_gpus num_gpus 1 "$most_gpus"

create_logfile=false
enable_benchmark=$(has_word --benchmark && echo true || echo false)
code_dir=$root
RESULTS_DIR=$out_dir/results
device=$( ((num_gpus > 0)) && echo cuda || echo cpu)
mapfile -t precision_words < <(precision_flags "$precision" 65536)
shared_flags=(
  --max-seq-length "$sequence_length" --output-dir "$RESULTS_DIR" --device "$device" --seed "$seed"
  --num-steps-per-checkpoint "$save_checkpoint_steps" --eval-steps "$save_checkpoint_steps" "${precision_words[@]}"
)
if [[ $objective == neighbours ]]; then
  program=run_embeddings
  trained=$RESULTS_DIR/$base/embedding
  [[ $learning_rate != None ]] || learning_rate=5e-5
  run_flags=(
    --do-train --do-eval --init-checkpoint "$init_checkpoint" --resume-from-checkpoint --max-steps "$train_steps"
    --train-file "$out_dir/sharded/training/*.txt" --eval-file "$out_dir/sharded/test/shard-00000.txt"
    --train-batch-size "$train_batch_size" --gradient-merge-steps "$gradient_accumulation_steps"
    --learning-rate "$learning_rate" --report-file "$RESULTS_DIR/dllogger_embedding.json"
  )
else
  program=run_pretraining
  BERT_MODEL=$base-$(basename "$(realpath -m "$out_dir")")
  is_valid file_name "$BERT_MODEL" ||
    fail "the model's name would be '$BERT_MODEL', of arguments 1 and 3: expected $(describe_kind file_name)"
  trained=$RESULTS_DIR/$BERT_MODEL/phase1
  samples=$out_dir/hdf5/seq_$sequence_length
  # A twentieth of much text is more than an evaluation needs.
  MAX_EVAL_SAMPLES=1000
  read -r -a run_flags < <(source "$root/scripts/configs/continue_config.sh" && "$preset")
  [[ $learning_rate == None ]] || run_flags+=(--learning-rate "$learning_rate")
  run_flags+=(
    --from-pretrained-params "$out_dir/vocab/$BERT_MODEL" --input-dir "$samples/training" --eval-dir "$samples/test"
    --max-eval-samples "$MAX_EVAL_SAMPLES" --masked-lm-prob 0.3:0.15
  )
fi
shared_flags+=("${extra_words[@]}")

# Bad flags in EXTRA_ARGS and TASK_ARGS are an error before the data are made.
check_flags() { # program flag...
  checkout_python -c "import sys, bert_recipe.utils.errors, $1 as program
sys.argv[0] = '${1//.//}.py'
program.parse_arguments()" "${@:2}"
}
MOST_STEPS=5000
check_flags "$program" --max-steps "${train_steps/None/$MOST_STEPS}" "${run_flags[@]}" "${shared_flags[@]}"
task_flags=()
if [[ -n $task_file ]]; then
  task_flags=(
    --before "$init_checkpoint" --after "$trained" --output-dir "$out_dir/task" --seed "$seed"
    --train-file "$task_file" --device "$device" "${precision_words[@]}" "${task_words[@]}"
  )
  check_flags scripts.compare_on_task "${task_flags[@]}"
fi
# The held-out part is for evaluations: that there is none is an error. A few books are divided, or half of them would be
# held out.
MAX_DOCUMENT_KB=50
split_flags=(--test-fraction 0.05 --max-document-kb "$MAX_DOCUMENT_KB")
require_held_out() {
  [[ -f $out_dir/sharded/test/shard-00000.txt ]] ||
    fail "argument 2 (corpus): $corpus has fewer than four documents, too few to hold one out: give more texts, or" \
      'DATA_ARGS="--empty-line document" if an empty line ends a document'
}
# What is None of train_steps, train_batch_size and gradient_accumulation_steps, by the number of samples. More passes over
# a text teach little (Muennighoff et al., 2023, arXiv 2305.16264). Little text makes enough updates with smaller batches.
PASSES=4 MOST_SEQUENCES=256 FEWEST_TOKENS=4096 ENOUGH_STEPS=500
plan_updates() { # num_samples
  local sequences=$MOST_SEQUENCES # of an update
  while ((sequences * sequence_length > FEWEST_TOKENS && PASSES * $1 / sequences < ENOUGH_STEPS)); do
    sequences=$((sequences / 2))
  done
  if [[ $train_batch_size == None ]]; then
    train_batch_size=$(at_least_one $((sequences / batch_processes / ${gradient_accumulation_steps/None/1})))
    ((train_batch_size <= 32)) || train_batch_size=32
  fi
  [[ $gradient_accumulation_steps != None ]] ||
    gradient_accumulation_steps=$(at_least_one $((sequences / batch_processes / train_batch_size)))
  sequences=$((train_batch_size * gradient_accumulation_steps * batch_processes))
  if [[ $train_steps == None ]]; then
    train_steps=$(at_least_one $((PASSES * $1 / sequences)))
    ((train_steps <= MOST_STEPS)) || train_steps=$MOST_STEPS
  fi
  say "$1 samples: $train_steps updates of $sequences"
}
num_samples() { # folder_of_samples
  python3 -c 'import json, sys
with open(sys.argv[1] + "/manifest.json") as manifest:
    print(json.load(manifest)["counts"]["samples"])' "$1"
}
at_least_one() { echo $(($1 > 1 ? $1 : 1)); }
report_at_exit "$RESULTS_DIR"
if [[ $objective == neighbours ]]; then
  python3 "$root/data/prepare.py" format corpus "$corpus" --output-dir "$out_dir" --sentence-splitter passage \
    "${data_words[@]}"
  # Small shards, because evaluations are on one of them.
  python3 "$root/data/prepare.py" shard --output-dir "$out_dir" --shard-mb 1 "${split_flags[@]}"
  require_held_out
  log_file=''
  launch "$processes" "$root/run_embeddings.py" "${run_flags[@]}" "${shared_flags[@]}"
else
  python3 "$root/data/prepare.py" all corpus "$corpus" --output-dir "$out_dir" --extend "$init_checkpoint" \
    --add "$new_words" --model-name "$BERT_MODEL" --lengths "$sequence_length" --dynamic-masking --no-nsp \
    --pack-documents "${split_flags[@]}" "${data_words[@]}"
  require_held_out
  plan_updates "$(num_samples "$samples/training")"
  run_phase phase1 "$train_steps" "$train_batch_size" "$gradient_accumulation_steps" "${run_flags[@]}"
fi
[[ -n $task_file && $only_estimates == false && $enable_benchmark == false && -z ${DOCTOR:-} ]] || exit 0
python3 "$root/scripts/compare_on_task.py" "${task_flags[@]}"
