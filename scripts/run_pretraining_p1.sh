#!/usr/bin/env bash
# Phase 1 of BERT-large on the GPUs of this machine, or NUM_GPUS of them, with every flag by name; common.sh has those of both phases. Flags given to this script
# are added, and override these. If interrupted, rerun to resume. run_pretraining_p2.sh is next.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=common.sh
source scripts/common.sh

# The global batch is 8 GPUs x 256 sequences x 32 micro-batches = 65,536 sequences of 128 tokens.
phase_of_bert_large 1 128 20 32 \
  --max-steps 7038 \
  --batch-size 256 \
  --learning-rate 6e-3 \
  --warmup-proportion 0.2843 \
  "$@"
