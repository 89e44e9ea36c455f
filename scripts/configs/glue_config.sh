# Presets for run_glue.sh. Each function prints the script's arguments in their order:
#
#   bash scripts/run_glue.sh $(source scripts/configs/glue_config.sh && dgxa100-80g_8gpu_amp sst-2)
#
# The argument of a preset is the task, mrpc by default. The GPU presets fine-tune the final model of
# run_pretraining.sh's presets; the 8-GPU ones have a global batch of 128. None is for paths below RESULTS_DIR and
# BERT_PREP_WORKING_DIR, which the script fills in.
# shellcheck shell=bash

dgxa100-80g_8gpu_amp() { _glue_arguments amp 8 16 2.4e-5 "$@"; }
dgxa100-80g_8gpu_tf32() { _glue_arguments tf32 8 16 2.4e-5 "$@"; }
a100-80g_1gpu_amp() { _glue_arguments amp 1 16 2.4e-5 "$@"; }
a100-80g_1gpu_tf32() { _glue_arguments tf32 1 16 2.4e-5 "$@"; }
dgxh100-80g_8gpu_amp() { _glue_arguments amp 8 16 2.4e-5 "$@"; }
dgxh100-80g_8gpu_tf32() { _glue_arguments tf32 8 16 2.4e-5 "$@"; }
h100-80g_1gpu_amp() { _glue_arguments amp 1 16 2.4e-5 "$@"; }
h100-80g_1gpu_tf32() { _glue_arguments tf32 1 16 2.4e-5 "$@"; }
cpu_fp32() { _glue_arguments fp32 0 16 2.4e-5 "$@"; }

# precision, GPUs, sequences per GPU, learning rate, task
_glue_arguments() {
  local task_name=${5:-mrpc}
  local init_checkpoint=None data_dir=None vocab_file=None config_file=None out_dir=None
  local num_gpu=$2 batch_size=$3 gradient_accumulation_steps=1 learning_rate=$4 warmup_proportion=0.1 epochs=3
  local max_steps=-1 precision=$1 seed=2 mode=train_eval
  echo "$init_checkpoint" "$data_dir" "$vocab_file" "$config_file" "$out_dir" "$task_name" "$num_gpu" "$batch_size" \
    "$gradient_accumulation_steps" "$learning_rate" "$warmup_proportion" "$epochs" "$max_steps" "$precision" "$seed" \
    "$mode"
}

# shellcheck source=unknown_preset.sh
source "$(dirname "${BASH_SOURCE[0]}")/unknown_preset.sh"
