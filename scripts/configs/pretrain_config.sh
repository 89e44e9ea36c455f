# Presets for run_pretraining.sh. Each function prints the script's arguments in their order:
#
#   bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && dgxa100-80g_8gpu_amp)
#
# The GPU presets keep BERT-large's global batch: 65,536 sequences of 128 in phase 1 and 32,768 of 512 in phase 2.
# None is for paths below BERT_PREP_WORKING_DIR, which the script fills in. Other paths are relative to the root of the
# repository: run the commands there.
# shellcheck shell=bash

dgxa100-80g_8gpu_amp() { _pretraining_arguments amp 8 256 32 32 128; }
dgxa100-80g_8gpu_tf32() { _pretraining_arguments tf32 8 128 64 16 256; }
a100-80g_1gpu_amp() { _pretraining_arguments amp 1 256 256 32 1024; }
a100-80g_1gpu_tf32() { _pretraining_arguments tf32 1 128 512 16 2048; }
dgxh100-80g_8gpu_amp() { _pretraining_arguments amp 8 256 32 32 128; }
dgxh100-80g_8gpu_tf32() { _pretraining_arguments tf32 8 128 64 16 256; }
h100-80g_1gpu_amp() { _pretraining_arguments amp 1 256 256 32 1024; }
h100-80g_1gpu_tf32() { _pretraining_arguments tf32 1 128 512 16 2048; }

# BERT with 1.3 and 13 billion parameters, sharded over all GPUs. Their flags have no position:
#
#   source scripts/configs/pretrain_config.sh
#   EXTRA_ARGS=$flags_1p3b bash scripts/run_pretraining.sh $(dgxh100-80g_8gpu_amp_1p3b)
#
# On several nodes, divide the gradient accumulation by their number. The learning rates are BERT-large's, not tuned.
dgxh100-80g_8gpu_amp_1p3b() { _large_model_arguments bert_configs/bert-1.3b-uncased.json 128 64 32 128; }
dgxh100-80g_8gpu_amp_13b() { _large_model_arguments bert_configs/bert-13b-uncased.json 64 128 16 256; }
# shellcheck disable=SC2034 # for EXTRA_ARGS
{
  flags_1p3b='--data-parallel-shard-degree -1 --use-pure-fp16'
  flags_13b='--data-parallel-shard-degree -1 --use-pure-fp16 --activation-checkpoint selective'
}

# DeepSpeed's bing_bert recipe for BERT-large, one phase after the other:
#
#   source scripts/configs/pretrain_config.sh
#   PHASE=1 EXTRA_ARGS=$flags_bsz64k_seq128 bash scripts/run_pretraining.sh $(deepspeed_bsz64k_lamb_config_seq128)
#   PHASE=2 EXTRA_ARGS=$flags_bsz32k_seq512 bash scripts/run_pretraining.sh $(deepspeed_bsz32k_lamb_config_seq512)
#
# The steps are those of its published run: 403M sequences of 128, then 20M of 512 with the optimizer's state kept. Both
# warmups have 150 updates (there 0.02 of 7,500), written as a share of the updates that are made.
deepspeed_bsz64k_lamb_config_seq128() { _bing_bert_arguments; }
deepspeed_bsz32k_lamb_config_seq512() { _bing_bert_arguments; }
_flags_bing_bert='--lamb-min-coeff 0.01 --lamb-max-coeff 0.3 --lamb-bias-correction false --lamb-adapt-undecayed'
_flags_bing_bert+=' --epsilon 1e-8 --lr-decay warmup_exp_decay_exp --lr-decay-rate 0.9 --pre-layer-norm'
# shellcheck disable=SC2034 # for EXTRA_ARGS
{
  flags_bsz64k_seq128="$_flags_bing_bert --lr-decay-steps 250 --lr-offset 1e-3"
  flags_bsz32k_seq512="$_flags_bing_bert --lr-decay-steps 150 --lr-rewarmup"
}

_bing_bert_arguments() {
  local train_batch_size=64 learning_rate=11e-3 precision=fp16 num_gpus=8 warmup_proportion=0.02439421 train_steps=6149
  local save_checkpoint_steps=200 create_logfile=true gradient_accumulation_steps=128 seed=42 job_name=bing_bert
  local train_batch_size_phase2=8 learning_rate_phase2=2e-3 warmup_proportion_phase2=0.24590164
  local train_steps_phase2=6759 gradient_accumulation_steps_phase2=512 # 610 updates after phase 1's
  echo "$train_batch_size" "$learning_rate" "$precision" "$num_gpus" "$warmup_proportion" "$train_steps" \
    "$save_checkpoint_steps" "$create_logfile" "$gradient_accumulation_steps" "$seed" "$job_name" \
    "$train_batch_size_phase2" "$learning_rate_phase2" "$warmup_proportion_phase2" "$train_steps_phase2" \
    "$gradient_accumulation_steps_phase2"
}

# config file, then micro-batch and gradient accumulation of each phase
_large_model_arguments() {
  echo "$(_pretraining_arguments amp 8 "${@:2}")" None None . None "$1"
}

# precision, GPUs, then micro-batch and gradient accumulation of each phase
_pretraining_arguments() {
  local precision=$1 num_gpus=$2
  local train_batch_size=$3 gradient_accumulation_steps=$4
  local train_batch_size_phase2=$5 gradient_accumulation_steps_phase2=$6
  local learning_rate=6e-3 warmup_proportion=0.2843 train_steps=7038
  local learning_rate_phase2=4e-3 warmup_proportion_phase2=0.128 train_steps_phase2=1563
  local save_checkpoint_steps=200 create_logfile=true seed=12439 job_name=bert_lamb_pretraining
  echo "$train_batch_size" "$learning_rate" "$precision" "$num_gpus" "$warmup_proportion" "$train_steps" \
    "$save_checkpoint_steps" "$create_logfile" "$gradient_accumulation_steps" "$seed" "$job_name" \
    "$train_batch_size_phase2" "$learning_rate_phase2" "$warmup_proportion_phase2" "$train_steps_phase2" \
    "$gradient_accumulation_steps_phase2"
}

# A two-layer BERT on the sample corpus, for a CPU with two cores; scripts/quickstart.sh makes its shards, in
# BERT_PREP_WORKING_DIR=quickstart.
cpu_sample_fp32() {
  local train_batch_size=32 learning_rate=1e-2 precision=fp32 num_gpus=0 warmup_proportion=0.1 train_steps=400
  local save_checkpoint_steps=100 create_logfile=false gradient_accumulation_steps=1 seed=12439
  local job_name=quickstart_pretraining
  local train_batch_size_phase2=8 learning_rate_phase2=1e-2 warmup_proportion_phase2=0.1 train_steps_phase2=100
  local gradient_accumulation_steps_phase2=2
  local dataset_dir_phase1=None dataset_dir_phase2=None
  local code_dir=. init_checkpoint_dir=None bert_config_file=bert_configs/bert-tiny-uncased.json
  echo "$train_batch_size" "$learning_rate" "$precision" "$num_gpus" "$warmup_proportion" "$train_steps" \
    "$save_checkpoint_steps" "$create_logfile" "$gradient_accumulation_steps" "$seed" "$job_name" \
    "$train_batch_size_phase2" "$learning_rate_phase2" "$warmup_proportion_phase2" "$train_steps_phase2" \
    "$gradient_accumulation_steps_phase2" "$dataset_dir_phase1" "$dataset_dir_phase2" "$code_dir" \
    "$init_checkpoint_dir" "$bert_config_file"
}

# shellcheck source=unknown_preset.sh
source "$(dirname "${BASH_SOURCE[0]}")/unknown_preset.sh"
