#!/usr/bin/env bash
# Phase 2 of BERT-large on 8 GPUs with every flag by name. Flags given to this script are added, and override those
# below. It starts from the final weights of run_pretraining_p1.sh. If interrupted, rerun to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=common.sh
source scripts/common.sh

# shellcheck source=setup_environment.sh
source scripts/setup_environment.sh use
results=${RESULTS_DIR:-results}

# The global batch is 8 GPUs x 32 sequences x 128 micro-batches = 32,768 sequences of 512 tokens.
nodes=1 node_rank=0 log_file=''
launch "${NUM_GPUS:-8}" run_pretraining.py \
  --input-dir "$(find_shards 512 80 "${BERT_PREP_WORKING_DIR:-data}")" \
  --output-dir "$results" \
  --bert-model bert-large-uncased \
  --vocab-file vocab/bert-large-uncased-vocab.txt \
  --phase2 \
  --max-seq-length 512 \
  --max-predictions-per-seq 80 \
  --max-steps 1563 \
  --batch-size 32 \
  --gradient-merge-steps 128 \
  --optimizer Lamb \
  --learning-rate 4e-3 \
  --warmup-proportion 0.128 \
  --amp \
  --seed 12439 \
  --num-steps-per-checkpoint 200 \
  --log-freq 1 \
  --report-file "$results/dllogger_p2.json" \
  --from-phase1-final-params "$results/bert-large-uncased/phase1/7038" \
  --from-checkpoint "$results/bert-large-uncased/phase2" \
  --last-step-of-checkpoint auto \
  "$@"
