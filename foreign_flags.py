"""Flags of other systems that no program has: what to type instead, or why not. Others are names of
flags here.
"""

from typing import NamedTuple

from run_config import FINE_TUNING, PRE_TRAINING

INFERENCE, DATA = "inference", "data"
TRAINING = (PRE_TRAINING, FINE_TUNING)


class Row(NamedTuple):
    """names: the flags, as typed there. is_accepted: they are read and do nothing, because of
    `here`; otherwise they are refused with `here`. programs: where this holds.
    """

    names: str
    here: str
    is_accepted: bool = False
    programs: tuple[str, ...] = TRAINING


# fmt: off
TABLE = (
    # NVIDIA
    Row("--do_train", "pre-training always trains", is_accepted=True, programs=(PRE_TRAINING,)),
    Row("--fuse-mha", "attention is always fused", is_accepted=True),
    Row("--no_dense_sequence_output", "the MLM head runs on masked tokens only", is_accepted=True),
    Row("--allreduce_post_accumulation", "gradients are always reduced once per update", is_accepted=True),
    Row("--allreduce_post_accumulation_fp16", "gradients are reduced once per update, in float32", is_accepted=True),
    Row("--train_batch_size", "in NVIDIA's PyTorch recipe the batch per GPU and update: give --batch-size its "
        "value divided by --gradient-accumulation-steps", programs=(PRE_TRAINING,)),
    Row("--checkpoint_activations", "use --activation-checkpoint full"),
    Row("--phase1_end_step", "use --max-steps in phase 1, and --from-phase1-final-params in phase 2"),
    Row("--steps_this_run_phase1", "use --steps-this-run"),
    Row("--skip_checkpoint", "use --num-steps-per-checkpoint, above --max-steps; the last step is saved"),
    Row("--n_gpu", "use torchrun --nproc-per-node=N"),
    Row("--loss_scale", "use --scale-loss, or --use-dynamic-loss-scaling"),
    Row("--eval-script", "--do-eval scores predictions without another script; leave it out"),
    Row("--verbose-logging", "leave it out"),
    Row("--disable-progress-bar", "there is no bar without a terminal; leave it out"),
    Row("--skip_cache --cache_dir", "features are made at each start; leave it out"),
    Row("--output_file", "use --output-dir: shards are written into a folder", programs=(DATA,)),
    Row("--bert_model", "the architecture is that of the folder; leave it out", programs=(INFERENCE,)),
    Row("--fp16", "inference computes in float32; leave it out", programs=(INFERENCE,)),
    Row("--no_gpu", "use --device cpu", programs=(INFERENCE,)),
    Row("--seed", "inference draws no random numbers; leave it out", programs=(INFERENCE,)),
    # DeepSpeed
    Row("--delay_allreduce", "gradients are always reduced once per update", is_accepted=True),
    Row("--cf", "use --config-file for the architecture (the file's bert_model_config), flags for its "
        "training block, and --deepspeed-config for DeepSpeed's JSON file"),
    Row("--lr_schedule", "use --lr-decay: EE is warmup_exp_decay_exp; LE and EP are not there"),
    Row("--job_name", "use --output-dir, another one for each run"),
    Row("--data_path_prefix --use_nvidia_dataset", "use --input-dir, a folder of HDF5 shards"),
    Row("--load_training_checkpoint --load_checkpoint_id", "use --from-checkpoint to resume, "
        "--from-phase1-final-params between phases"),
    Row("--model_file", "use --init-checkpoint, a model folder (convert_checkpoint.py makes one)"),
    Row("--use_pretrain", "use --init-checkpoint"),
    Row("--ckpt_to_save", "use --num-steps-per-checkpoint; the newest three are kept"),
    Row("--deepspeed_transformer_kernel --stochastic_mode", "leave it out; see --compile layers, without --deepspeed"),
    Row("--attention_dropout_checkpoint --gelu_checkpoint --normalize_invertible", "use "
        "--activation-checkpoint selective or full"),
    Row("--refresh_bucket_size --max_steps_per_epoch --finetune", "not there; leave it out"),
    # Hugging Face
    Row("--bf16", "use --amp, which computes in bfloat16"),
    Row("--group_by_length", "batches have no padding", is_accepted=True),
    Row("--train_file --validation_file --dataset_name", "make shards of your text "
        "(data/create_datasets_from_start.sh corpus FOLDER) and give them as --input-dir and "
        "--eval-dir",
        programs=(PRE_TRAINING,)),
    Row("--dataset_name --dataset_config_name", "data sets are files here: save it as CSV or JSON lines "
        "and use --train-file and --eval-file", programs=(FINE_TUNING,)),
    Row("--eval_strategy --evaluation_strategy", "use --eval-steps N; without it the end is scored"),
    Row("--save_strategy --logging_strategy", "use --num-steps-per-checkpoint, --log-freq"),
    Row("--load_best_model_at_end", "with --eval-steps the best checkpoint is kept, and read by "
        "inference.py; leave it out"),
    Row("--metric_for_best_model --greater_is_better", "the task's metric selects the best checkpoint; leave it out"),
    Row("--report_to --logging_dir", "use --tensorboard-dir, --wandb-project or --report-file"),
    Row("--max_train_samples --max_eval_samples --max_predict_samples", "shorten the file, or use --max-steps"),
    Row("--gradient_checkpointing", "use --activation-checkpoint full"),
    Row("--warmup_steps --num_warmup_steps", "use --warmup-proportion, a share of all updates"),
    Row("--save_total_limit", "the newest three checkpoints are kept; leave it out"),
    Row("--tokenizer_name", "use --vocab-file, a vocab.txt or tokenizer.json"),
    Row("--config_name", "use --config-file"),
    Row("--optim", "use --optimizer AdamW"),
    Row("--fsdp", "use --data-parallel-shard-degree -1"),
    Row("--torch_compile", "use --compile model"),
    Row("--pad_to_max_length --line_by_line --overwrite_cache --preprocessing_num_workers --push_to_hub",
        "not needed here; leave it out"),
)
# fmt: on


def foreign_flags(program: str) -> dict[str, tuple[bool, str]]:
    """Whether the flags of other systems are accepted, and the text, for a kind of program; by name
    with hyphens.
    """
    rows = [row for row in TABLE if program in row.programs]
    return {
        name: (row.is_accepted, row.here)
        for row in rows
        for name in row.names.replace("_", "-").split()
    }
