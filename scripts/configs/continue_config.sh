# Presets for continued pre-training. Each function prints flags of run_pretraining.py:
#
#   python3 run_pretraining.py $(source scripts/configs/continue_config.sh && decayed_checkpoint) --init-checkpoint FOLDER ...
#
# Learning rates are for base models; halve them for large ones. They are advice, not measured (docs/continue_pretraining.md).
# shellcheck shell=bash

# A released model, such as BERT, RoBERTa or ModernBERT on the hub: its learning rate has decayed. Warm up again, hold, decay.
decayed_checkpoint() {
  echo --optimizer AdamW --beta2 0.98 --weight-decay 0.01 --learning-rate 1e-4 \
    --lr-decay warmup_stable_decay --warmup-proportion 0.05 --lr-decay-proportion 0.2
}

# A checkpoint from before the decay, such as ModernBERT's of the stable phase: hold its rate, then decay.
stable_checkpoint() {
  echo --optimizer AdamW --beta2 0.98 --weight-decay 0.0125 --learning-rate 3e-4 \
    --lr-decay warmup_stable_decay --warmup-proportion 0 --lr-decay-proportion 0.3
}

# shellcheck source=unknown_preset.sh
source "$(dirname "${BASH_SOURCE[0]}")/unknown_preset.sh"
