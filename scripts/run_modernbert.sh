#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # common.sh sets the arguments from their table
#
# Pre-trains ModernBERT in two phases, at sequence lengths 1,024 and 8,192. If interrupted, rerun to resume.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=common.sh
source "$root/scripts/common.sh"

ARGUMENTS=(
  # name                              | default                   | kind               | help
  "config_file                        | $root/bert_configs/modernbert-base.json | text | architecture"
  "optimizer                          | NorMuon                   | AdamW,Muon,NorMuon | Muon and NorMuon are for the matrices of the layers"
  "precision                          | amp                       | $PRECISIONS        | as for run_pretraining.sh"
  "num_gpus                           | all                       | gpus               | as for run_pretraining.sh"
  "train_batch_size                   | 64                        | positive_int       | sequences per GPU and micro-batch, phase 1"
  "gradient_accumulation_steps        | 2                         | positive_int       | micro-batches per update, phase 1"
  "learning_rate                      | 8e-4                      | non_negative_float | peak learning rate, phase 1"
  "train_steps                        | 10000                     | positive_int       | updates of phase 1"
  "train_batch_size_phase2            | 8                         | positive_int       | sequences per GPU and micro-batch, phase 2"
  "gradient_accumulation_steps_phase2 | 2                         | positive_int       | micro-batches per update, phase 2"
  "learning_rate_phase2               | 3e-4                      | non_negative_float | peak learning rate, phase 2"
  "train_steps_phase2                 | 1000                      | positive_int       | updates of phase 2"
  "save_checkpoint_steps              | 200                       | positive_int       | updates between checkpoints"
  "seed                               | 42                        | non_negative_int   | seed of weights and sample order"
  "dataset_dir_phase1                 | $data_dir/hdf5/seq_1024/training | text        | HDF5 shards without masks, length 1024"
  "dataset_dir_phase2                 | $data_dir/hdf5/seq_8192/training | text        | HDF5 shards without masks, length 8192"
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/run_modernbert.sh [ARGUMENT...]
   or: bash scripts/run_modernbert.sh \$(source scripts/configs/modernbert_config.sh && PRESET)

Pre-trains ModernBERT with masked language modelling in two phases. 30% of the tokens are masked, anew in every epoch.
The global rope theta is 10,000 in phase 1 and that of the config in phase 2. Arguments are positional; a missing or
empty one, or None, takes its [default]:"
  print_arguments
  echo '
Environment: BERT_PREP_WORKING_DIR, RESULTS_DIR, VOCAB_FILE, EVAL_DIR_PHASE1, EVAL_DIR_PHASE2, EXTRA_ARGS, DOCTOR
and the variables of several nodes are those of run_pretraining.sh; see its --help. By default, VOCAB_FILE is the
vocabulary beside config_file, or else that of BERT.'
  exit
fi
parse_arguments "$@"
[[ -z ${BERT_MODEL:-} ]] || fail 'BERT_MODEL is for run_pretraining.sh: unset it; argument 1 is the architecture'
[[ -z ${PHASE:-} ]] || fail 'PHASE is for run_pretraining.sh: unset it; a phase that is complete is not run again'

create_logfile=false
code_dir=$root
RESULTS_DIR=${RESULTS_DIR:-$root/results}
require_file 'argument 1 (config_file)' "$config_file"
require_folder 'argument 15 (dataset_dir_phase1)' "$dataset_dir_phase1" 'make it: docs/modernbert.md'
require_folder 'argument 16 (dataset_dir_phase2)' "$dataset_dir_phase2" 'make it: docs/modernbert.md'
for name in vocab.txt tokenizer.json; do # beside the config that data/prepare.py writes
  beside=$(dirname "$config_file")/$name
  [[ ! -f $beside ]] || VOCAB_FILE=${VOCAB_FILE:-$beside}
done
VOCAB_FILE=${VOCAB_FILE:-$root/vocab/bert-base-uncased-vocab.txt}
require_file VOCAB_FILE "$VOCAB_FILE"
read_extra_args
only_estimates=$(has_word '--estimate[-_]memory*' && echo true || echo false)
enable_benchmark=$(has_word --benchmark && echo true || echo false)
find_nodes
# shellcheck source=setup_environment.sh
source "$root/scripts/setup_environment.sh" use
find_gpus num_gpus 8
BERT_MODEL=$(model_name --config-file "$config_file")

# By optimizer. It is multiplied by the learning rate: with AdamW at 8e-4, ModernBERT's 1e-5 per update. Muon's is that
# of Liu et al. (2025); without it, its weights keep growing.
declare -A weight_decays=([AdamW]=0.0125 [Muon]=0.1 [NorMuon]=0.1)
mapfile -t precision_words < <(precision_flags "$precision" 65536)
shared_flags=(
  --output-dir "$RESULTS_DIR" --config-file "$config_file" --vocab-file "$VOCAB_FILE"
  --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" --seed "$seed"
  --num-steps-per-checkpoint "$save_checkpoint_steps" --optimizer "$optimizer" --beta2 0.98 --epsilon 1e-6
  --weight-decay "${weight_decays[$optimizer]}" --lr-decay warmup_stable_decay --masked-lm-prob 0.3 "${precision_words[@]}" "${extra_words[@]}"
)
report_at_exit "$RESULTS_DIR"

if needs_phase1 'argument 8 (train_steps)' "$train_steps"; then
  run_phase phase1 "$train_steps" "$train_batch_size" "$gradient_accumulation_steps" \
    --input-dir "$dataset_dir_phase1" --eval-dir "${EVAL_DIR_PHASE1:-None}" \
    --max-seq-length 1024 --max-predictions-per-seq 307 --global-rope-theta 10000 \
    --learning-rate "$learning_rate" --warmup-proportion 0.05 --lr-decay-proportion 0.1
fi
phase1_weights=$RESULTS_DIR/$BERT_MODEL/phase1/$train_steps
[[ $only_estimates == false && $enable_benchmark == false && (-z ${DOCTOR:-} || -d $phase1_weights) ]] || phase1_weights=None
run_phase phase2 "$train_steps_phase2" "$train_batch_size_phase2" "$gradient_accumulation_steps_phase2" \
  --input-dir "$dataset_dir_phase2" --eval-dir "${EVAL_DIR_PHASE2:-None}" \
  --max-seq-length 8192 --max-predictions-per-seq 2458 \
  --learning-rate "$learning_rate_phase2" --warmup-proportion 0 --lr-decay-proportion 0.5 \
  --from-phase1-final-params "$phase1_weights"
