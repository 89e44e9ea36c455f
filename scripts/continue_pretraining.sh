#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Continues the pre-training of a model on texts of a domain, with words of the domain in its vocabulary. If interrupted,
# rerun to resume.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

PRESETS=decayed_checkpoint,stable_checkpoint
ARGUMENTS=(
  # name                        | default            | kind               | help
  "init_checkpoint              | required           | text               | model folder to start from, or folder of steps"
  "corpus                       | required           | text               | texts: a file or a folder (docs/data.md)"
  "out_dir                      | required           | text               | folder for data and results, named after the domain"
  "new_words                    | 1000               | positive_int       | words of the domain to add to the vocabulary"
  "sequence_length              | 512                | positive_int       | tokens per sample"
  "train_steps                  | 5000               | positive_int       | updates"
  "train_batch_size             | 32                 | positive_int       | sequences per GPU and micro-batch"
  "gradient_accumulation_steps  | 8                  | positive_int       | micro-batches per update"
  "learning_rate                | None               | text               | peak learning rate; None: that of the preset"
  "precision                    | amp                | $PRECISIONS        | as for run_pretraining.sh"
  "num_gpus                     | 1                  | non_negative_int   | GPUs of this machine; 0: run on the CPU"
  "preset                       | decayed_checkpoint | $PRESETS | optimizer and schedule, of scripts/configs/continue_config.sh"
  "save_checkpoint_steps        | 500                | positive_int       | updates between checkpoints and between evaluations"
  "seed                         | 42                 | non_negative_int   | seed of new weights, dropout, masks and sample order"
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/continue_pretraining.sh INIT_CHECKPOINT CORPUS OUT_DIR [ARGUMENT...]

Adds words of the texts to the model's vocabulary, makes samples, a twentieth of the texts held out, and pre-trains with
masked language modelling. Evaluations are on at most 1,000 held-out samples. The model is named after INIT_CHECKPOINT and OUT_DIR. Arguments are positional; a missing or
empty one takes its [default]:"
  print_arguments
  echo '
Results: OUT_DIR/vocab/MODEL is the model with the new words before training, OUT_DIR/results/MODEL/phase1/STEP after,
OUT_DIR/results/report.html a page with the losses on training and held-out text.

Environment:
  DATA_ARGS   more flags for data/prepare.py all, such as "--empty-line document"; words can be quoted
  EXTRA_ARGS  more flags for run_pretraining.py, such as "--whole-word-mask"
  TASK_FILE   a table of labelled texts: at the end, the models before and after are fine-tuned on four fifths of it, and
              the differences of their scores on the rest are printed with intervals (OUT_DIR/task/comparison.txt)
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
only_estimates=$(estimates_memory && echo true || echo false)
find_nodes
((nodes == 1)) || fail "NNODES is $nodes: this script is for one machine; docs/continue_pretraining.md has its commands"
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
require_gpus "$num_gpus"
base=$(model_name --init-checkpoint "$init_checkpoint")
BERT_MODEL=$base-$(basename "$(realpath -m "$out_dir")")
is_valid file_name "$BERT_MODEL" ||
  fail "the model's name would be '$BERT_MODEL', of arguments 1 and 3: expected $(describe_kind file_name)"

create_logfile=false
enable_benchmark=false
code_dir=$root
RESULTS_DIR=$out_dir/results
processes=$((num_gpus > 0 ? num_gpus : 1))
device=$( ((num_gpus > 0)) && echo cuda || echo cpu)
samples=$out_dir/hdf5/seq_$sequence_length
mapfile -t precision_words < <(precision_flags "$precision" 65536)
read -r -a preset_words < <(source "$root/scripts/configs/continue_config.sh" && "$preset")
[[ $learning_rate == None ]] || preset_words+=(--learning-rate "$learning_rate")
shared_flags=(
  "${preset_words[@]}" --output-dir "$RESULTS_DIR" --device "$device"
  --seed "$seed" --num-steps-per-checkpoint "$save_checkpoint_steps" --eval-steps "$save_checkpoint_steps"
  --masked-lm-prob 0.3:0.15 "${precision_words[@]}" "${extra_words[@]}"
)

# A twentieth of much text is more than an evaluation needs.
MAX_EVAL_SAMPLES=1000
run_flags=(
  --from-pretrained-params "$out_dir/vocab/$BERT_MODEL" --input-dir "$samples/training" --eval-dir "$samples/test"
  --max-seq-length "$sequence_length" --max-eval-samples "$MAX_EVAL_SAMPLES"
)
# Bad flags in EXTRA_ARGS and TASK_ARGS are an error before the data are made.
check_flags() { # program flag...
  PYTHONPATH=$root python3 -c "import sys, bert_recipe.utils.errors, $1 as program
sys.argv[0] = '$1.py'
program.parse_arguments()" "${@:2}"
}
check_flags run_pretraining --max-steps "$train_steps" "${run_flags[@]}" "${shared_flags[@]}"
task_flags=()
if [[ -n $task_file ]]; then
  task_flags=(
    --before "$init_checkpoint" --after "$RESULTS_DIR/$BERT_MODEL/phase1" --output-dir "$out_dir/task" --seed "$seed"
    --train-file "$task_file" --device "$device" "${precision_words[@]}" "${task_words[@]}"
  )
  check_flags scripts.compare_on_task "${task_flags[@]}"
fi
if [[ -f $init_checkpoint/modules.json ]]; then
  say "note: $init_checkpoint is a sentence-embedding model. Masked words made such a model worse in short fine-tuning,"
  say "and neighbouring lines better (docs/continue_pretraining.md). Stop this run, and train it on a file with a paragraph \
per line: python3 run_embeddings.py --do-train --init-checkpoint $init_checkpoint --train-file lines.txt \
--output-dir $RESULTS_DIR --learning-rate 5e-5"
fi

# The held-out part is for --eval-dir: that there is none is an error. A few books are divided, or half of them would be
# held out.
MAX_DOCUMENT_KB=50
python3 "$root/data/prepare.py" all corpus "$corpus" --output-dir "$out_dir" --extend "$init_checkpoint" \
  --add "$new_words" --model-name "$BERT_MODEL" --lengths "$sequence_length" --dynamic-masking --no-nsp \
  --pack-documents --test-fraction 0.05 --max-document-kb "$MAX_DOCUMENT_KB" "${data_words[@]}"

report_at_exit "$RESULTS_DIR"
run_phase phase1 "$train_steps" "$train_batch_size" "$gradient_accumulation_steps" "${run_flags[@]}"
[[ -n $task_file && $only_estimates == false && -z ${DOCTOR:-} ]] || exit 0
python3 "$root/scripts/compare_on_task.py" "${task_flags[@]}"
