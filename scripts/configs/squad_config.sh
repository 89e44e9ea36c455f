# Presets for run_squad.sh. Each function prints the script's arguments in their order:
#
#   bash scripts/run_squad.sh $(source scripts/configs/squad_config.sh && dgxa100-80g_8gpu_amp)
#
# The GPU presets fine-tune the final model of run_pretraining.sh's presets; the 8-GPU ones have a global batch of 256.
# None is for paths below RESULTS_DIR and BERT_PREP_WORKING_DIR, which the script fills in. Other paths are relative to the
# root of the repository: run the commands there.
# shellcheck shell=bash

dgxa100-80g_8gpu_amp() { _squad_arguments amp 8 32 4.6e-5; }
dgxa100-80g_8gpu_tf32() { _squad_arguments tf32 8 32 4.6e-5; }
a100-80g_1gpu_amp() { _squad_arguments amp 1 32 3e-5; }
a100-80g_1gpu_tf32() { _squad_arguments tf32 1 32 3e-5; }
dgxh100-80g_8gpu_amp() { _squad_arguments amp 8 32 4.6e-5; }
dgxh100-80g_8gpu_tf32() { _squad_arguments tf32 8 32 4.6e-5; }
h100-80g_1gpu_amp() { _squad_arguments amp 1 32 3e-5; }
h100-80g_1gpu_tf32() { _squad_arguments tf32 1 32 3e-5; }

# precision, GPUs, sequences a GPU, learning rate
_squad_arguments() {
  local init_checkpoint=None epochs=2 batch_size=$3 learning_rate=$4
  local warmup_proportion=0.2 precision=$1 num_gpus=$2 seed=1
  local squad_dir=None vocab_file=vocab/bert-large-uncased-vocab.txt OUT_DIR=None mode=train_eval
  echo "$init_checkpoint" "$epochs" "$batch_size" "$learning_rate" "$warmup_proportion" "$precision" "$num_gpus" \
    "$seed" "$squad_dir" "$vocab_file" "$OUT_DIR" "$mode"
}

# The small BERT of run_pretraining.sh's preset of this name on the SQuAD sample, for a CPU with two cores.
cpu_sample_fp32() {
  local init_checkpoint=None epochs=3 batch_size=16 learning_rate=3e-4
  local warmup_proportion=0.1 precision=fp32 num_gpus=0 seed=1 squad_dir=data/sample/squad
  local vocab_file=vocab/bert-base-uncased-vocab.txt OUT_DIR=None mode=train_eval
  local config_file=bert_configs/bert-tiny-uncased.json
  echo "$init_checkpoint" "$epochs" "$batch_size" "$learning_rate" "$warmup_proportion" "$precision" "$num_gpus" \
    "$seed" "$squad_dir" "$vocab_file" "$OUT_DIR" "$mode" "$config_file"
}

# shellcheck source=unknown_preset.sh
source "$(dirname "${BASH_SOURCE[0]}")/unknown_preset.sh"
