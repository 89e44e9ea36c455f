#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Pre-trains a first model on texts in any language: a vocabulary, samples, and a ModernBERT whose size, batch, rate and
# updates follow from the texts, the machine and the time. If interrupted, rerun to resume.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

ARGUMENTS=(
  # name     | default       | kind             | help
  "texts     | required      | text             | texts: a file or a folder (docs/data.md)"
  "out_dir   | required      | text             | folder for data, vocabulary and results"
  "minutes   | 60            | positive_int     | time to train, without the preparation of the data"
  "num_gpus  | all           | gpus             | GPUs of this machine, or its CPU; 0: run on the CPU"
  "precision | amp           | $PRECISIONS      | as for run_pretraining.sh"
  "seed      | 42            | non_negative_int | seed of weights, masks and sample order"
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/pretrain_from_texts.sh TEXTS OUT_DIR [ARGUMENT...]

Trains a vocabulary on the texts, makes samples, a twentieth of the texts held out, and pre-trains a ModernBERT with masked
language modelling and NorMuon. The plan is printed before it starts: the size by the time, the speed of the machine and
the length of the texts, as many updates as fit into the minutes, and at most 40 passes over the texts.

Arguments are positional; a missing or empty one takes its [default]:"
  print_arguments
  echo '
Results: OUT_DIR/results/custom/phase1/best is the model with the lowest loss on held-out text, OUT_DIR/results/report.html a
page with the losses, OUT_DIR/plan.json the plan, which a resumed run keeps.

Environment:
  DATA_ARGS   more flags for data/prepare.py all, such as "--language de --vocab-size 30000"; words can be quoted
  EXTRA_ARGS  more flags for run_pretraining.py, such as "--learning-rate 2e-3"'
  exit
fi
parse_arguments "$@"
for name in BERT_MODEL PHASE RESULTS_DIR DOCTOR; do
  [[ -z ${!name:-} ]] || fail "$name is for run_pretraining.sh: unset it"
done
[[ -e $texts ]] || fail "argument 1 (texts): $texts does not exist: check the path"
read_extra_args DATA_ARGS
data_words=("${extra_words[@]}")
read_extra_args
for word in '--max[-_]steps*' '--benchmark*' '--estimate[-_]memory*'; do
  ! has_word "$word" || fail 'EXTRA_ARGS: --max-steps, --benchmark and --estimate-memory are for run_pretraining.py; here the' \
    'minutes decide: leave them out'
done
find_nodes
((nodes == 1)) || fail "NNODES is $nodes: this script is for one machine; use run_modernbert.sh"
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpus 1

plan=("$root/scripts/pretraining_plan.py" "$out_dir")
words=$(python3 "${plan[@]}" --texts "$texts" --minutes "$minutes" --gpus "$num_gpus" --precision "$precision")
read -r model learning_rate length vocabulary precision batch micro_batch updates <<<"$words"
python3 "$root/data/prepare.py" all corpus "$texts" --output-dir "$out_dir" --train-vocab --vocab-size "$vocabulary" \
  --no-do-lower-case --bert-config "$root/bert_configs/$model.json" --lengths "$length" --dynamic-masking --no-nsp \
  --pack-documents --test-fraction 0.05 --max-document-kb 50 "${data_words[@]}"
samples=$out_dir/hdf5/seq_$length
[[ -f $out_dir/sharded/test/shard-00000.txt ]] ||
  fail "argument 1 (texts): $texts has fewer than four documents, too few to hold one out: give more texts"
vocab_file=$out_dir/vocab/vocab.txt
[[ -f $vocab_file ]] || vocab_file=$out_dir/vocab/tokenizer.json

create_logfile=false
enable_benchmark=false
only_estimates=false
code_dir=$root
RESULTS_DIR=$out_dir/results
BERT_MODEL=custom
batch_processes=$((batch / micro_batch))
mapfile -t precision_words < <(precision_flags "$precision" 65536)
shared_flags=(
  --output-dir "$RESULTS_DIR" --config-file "$out_dir/vocab/config.json" --vocab-file "$vocab_file"
  --input-dir "$samples/training" --max-seq-length "$length" --masked-lm-prob 0.3 --global-rope-theta 10000
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --seed "$seed" --optimizer NorMuon --weight-decay 0.1
  --beta2 0.98 --epsilon 1e-6 --learning-rate "$learning_rate" --lr-decay warmup_stable_decay --warmup-proportion 0.1
  --lr-decay-proportion 0.3 "${precision_words[@]}"
)
# EXTRA_ARGS without what is of the whole run, and which a measurement of the speed refuses.
speed_words() {
  local is_of_run=false word
  for word in "${extra_words[@]}"; do
    [[ $word != --* ]] || is_of_run=$(is_run_flag "${word//_/-}" && echo true || echo false)
    [[ $is_of_run == true ]] || printf '%s\0' "$word"
  done
}
is_run_flag() {
  [[ $1 =~ ^--(steps-this-run|eval-steps|max-eval-samples|early-stopping(-patience)?|num-seeds|overwrite.*)(=.*)?$ ]]
}
if [[ -z $updates ]]; then # of a new run: they follow from the speed
  say 'measuring the speed of an update'
  log_file=''
  rm -f -- "$out_dir/speed.json"
  set_batch_flags "$micro_batch" 1
  mapfile -d '' -t words_of_speed < <(speed_words)
  launch "$processes" "$root/run_pretraining.py" "${batch_flags[@]}" --batch-size "$micro_batch" --max-steps 40 \
    --benchmark --benchmark-warmup-steps 4 --benchmark-steps 36 --report-file "$out_dir/speed.json" "${shared_flags[@]}" \
    "${words_of_speed[@]}" --log-freq 1 >"$out_dir/speed.log"
fi
words=$(python3 "${plan[@]}" --speed-report "$out_dir/speed.json" --samples "$samples/training")
read -r updates first_part <<<"$words"
report_at_exit "$RESULTS_DIR"
shared_flags+=("${extra_words[@]}")
train() { # updates flag...
  local save_steps=$((($1 + 4) / 5)) # the fifth checkpoint is the end
  run_phase phase1 "$1" "$micro_batch" 1 --eval-dir "$samples/test" --max-eval-samples 500 --eval-steps "$save_steps" \
    --num-steps-per-checkpoint "$save_steps" "${@:2}"
}
# What else ran on the machine may have decided the speed: after a part of the run, that part's decides.
if ((first_part > 0)); then
  newest=$(newest_step "$RESULTS_DIR/custom/phase1" 2)
  if ((${newest:-0} < first_part)); then
    part_end=$first_part train "$updates" --steps-this-run $((first_part - ${newest:-0}))
  fi
  updates=$(python3 "${plan[@]}" --training-report "$RESULTS_DIR/dllogger_p1.json")
fi
train "$updates"
python3 "${plan[@]}" --training-report "$RESULTS_DIR/dllogger_p1.json"
printf -v best_model %q "$RESULTS_DIR/custom/phase1/best" # as a word of a command
say "the model: $best_model; try it: python3 inference.py --init-checkpoint $best_model" \
  "--fill-mask 'a sentence with a [MASK] in it'"
