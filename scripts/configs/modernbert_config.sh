# Presets for run_modernbert.sh. Each function prints the script's arguments in their order:
#
#   bash scripts/run_modernbert.sh $(source scripts/configs/modernbert_config.sh && dgxa100-80g_8gpu_amp_base)
#
# The GPU presets have a global batch of 1,024 sequences of 1,024 tokens in phase 1 and 128 of 8,192 in phase 2: 10.5 and
# 1.05 billion tokens. Paths are relative to the root of the repository: run the commands there.
# shellcheck shell=bash

dgxa100-80g_8gpu_amp_base() { _modernbert_arguments base AdamW 8 64 2 8 2; }
dgxa100-80g_8gpu_amp_base_normuon() { _modernbert_arguments base NorMuon 8 64 2 8 2; }
dgxa100-80g_8gpu_amp_large() { _modernbert_arguments large AdamW 8 32 4 4 4; }
a100-80g_1gpu_amp_base() { _modernbert_arguments base AdamW 1 64 16 8 16; }
a100-80g_1gpu_amp_base_normuon() { _modernbert_arguments base NorMuon 1 64 16 8 16; }

# size, optimizer, GPUs, then micro-batch and gradient accumulation of each phase
_modernbert_arguments() {
  local learning_rate=8e-4 train_steps=10000 learning_rate_phase2=3e-4 train_steps_phase2=1000
  [[ $1 != large ]] || learning_rate=5e-4
  echo "bert_configs/modernbert-$1.json" "$2" amp "$3" "$4" "$5" "$learning_rate" "$train_steps" \
    "$6" "$7" "$learning_rate_phase2" "$train_steps_phase2"
}

# A two-layer ModernBERT on the sample corpus, for a CPU with two cores; docs/modernbert.md makes its shards, and the
# vocabulary with its config. Their folder is BERT_PREP_WORKING_DIR, which must be exported.
cpu_sample_fp32() {
  local data=${BERT_PREP_WORKING_DIR:-data}
  local config=$data/vocab/config.json
  [[ -f $config ]] || config=bert_configs/modernbert-tiny.json
  echo "$config" AdamW fp32 0 4 1 2e-3 60 1 1 5e-4 4 30 42
}

# shellcheck source=unknown_preset.sh
source "$(dirname "${BASH_SOURCE[0]}")/unknown_preset.sh"
