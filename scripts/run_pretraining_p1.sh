#!/usr/bin/env bash
# Phase 1 of BERT-large on 8 GPUs with every flag by name. Flags given to this script are added, and override those
# below. If interrupted, rerun to resume. run_pretraining_p2.sh is next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=common.sh
source scripts/common.sh

# shellcheck source=setup_environment.sh
source scripts/setup_environment.sh use
results=${RESULTS_DIR:-results}

# The global batch is 8 GPUs x 256 sequences x 32 micro-batches = 65,536 sequences of 128 tokens.
nodes=1 node_rank=0 log_file=''
launch "${NUM_GPUS:-8}" run_pretraining.py \
  --input-dir "$(find_shards 128 20 "${BERT_PREP_WORKING_DIR:-data}")" \
  --output-dir "$results" \
  --bert-model bert-large-uncased \
  --vocab-file vocab/bert-large-uncased-vocab.txt \
  --phase1 \
  --max-seq-length 128 \
  --max-predictions-per-seq 20 \
  --max-steps 7038 \
  --batch-size 256 \
  --gradient-merge-steps 32 \
  --optimizer Lamb \
  --learning-rate 6e-3 \
  --warmup-proportion 0.2843 \
  --amp \
  --seed 12439 \
  --num-steps-per-checkpoint 200 \
  --log-freq 1 \
  --report-file "$results/dllogger_p1.json" \
  --from-checkpoint "$results/bert-large-uncased/phase1" \
  --last-step-of-checkpoint auto \
  "$@"
