#!/usr/bin/env bash
# Phase 2 of BERT-large on the GPUs of this machine, or NUM_GPUS of them, with every flag by name; common.sh has those of both phases. Flags given to this script
# are added, and override these. It starts from the final weights of run_pretraining_p1.sh. If interrupted, rerun to resume.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=common.sh
source scripts/common.sh

# The global batch is 8 GPUs x 32 sequences x 128 micro-batches = 32,768 sequences of 512 tokens.
phase_of_bert_large 2 512 80 128 \
  --max-steps 1563 \
  --batch-size 32 \
  --learning-rate 4e-3 \
  --warmup-proportion 0.128 \
  --from-phase1-final-params "${RESULTS_DIR:-results}/bert-large-uncased/phase1/7038" \
  "$@"
