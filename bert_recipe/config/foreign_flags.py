"""Flags of other systems that no program has, and what to type instead. Others are names of flags
here. A flag without a counterpart gets no row, unless the scripts of NVIDIA or bing_bert give it;
nor one that is like its counterpart, which "did you mean" names (utils/suggestions.py).
"""

from typing import NamedTuple

from bert_recipe.config import FINE_TUNING, PRE_TRAINING
from bert_recipe.utils.command_line import ForeignFlag

INFERENCE, DATA = "inference", "data"
TRAINING = (PRE_TRAINING, FINE_TUNING)


class Row(NamedTuple):
    """Flags of other programs that mean the same.

    names: the flags, as typed there.
    here: what is done here instead, or which flag to give.
    is_accepted: whether they are read and do nothing; otherwise they are refused with `here`.
    unless: values with which a refused flag asks for what is done anyway, and is read.
    programs: where this holds.
    """

    names: str
    here: str
    is_accepted: bool = False
    unless: tuple[str, ...] = ()
    programs: tuple[str, ...] = TRAINING


TABLE = (
    # NVIDIA
    Row("--do_train", "pre-training always trains", is_accepted=True, programs=(PRE_TRAINING,)),
    Row("--fuse-mha", "attention is always fused", is_accepted=True),
    Row("--no_dense_sequence_output", "the MLM head runs on masked tokens only", is_accepted=True),
    Row(
        "--allreduce_post_accumulation",
        "gradients are always reduced once per update",
        is_accepted=True,
    ),
    Row(
        "--allreduce_post_accumulation_fp16",
        "gradients are reduced once per update, in float32",
        is_accepted=True,
    ),
    Row(
        "--train_batch_size",
        (
            "in NVIDIA's PyTorch recipe the batch per GPU and update: give --batch-size its "
            "value divided by --gradient-accumulation-steps"
        ),
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--phase1_end_step", "use --max-steps in phase 1, and --from-phase1-final-params in phase 2"
    ),
    Row(
        "--skip_checkpoint",
        "use --num-steps-per-checkpoint, above --max-steps; the last step is saved",
    ),
    Row("--n_gpu", "use torchrun --nproc-per-node=N"),
    Row("--eval-script", "--do-eval scores predictions without another script; leave it out"),
    Row("--disable-progress-bar", "there is no bar without a terminal; leave it out"),
    Row("--output_file", "use --output-dir: shards are written into a folder", programs=(DATA,)),
    Row(
        "--bert_model",
        "the architecture is that of the folder; leave it out",
        programs=(INFERENCE,),
    ),
    Row("--fp16", "use --amp, which computes in bfloat16", programs=(INFERENCE,)),
    Row("--no_gpu", "use --device cpu", programs=(INFERENCE,)),
    Row("--truncate", "long texts are always cut", is_accepted=True, programs=(INFERENCE,)),
    # DeepSpeed
    Row("--delay_allreduce", "gradients are always reduced once per update", is_accepted=True),
    Row(
        "--cf",
        (
            "use --config-file for the architecture (the file's bert_model_config), flags "
            "for its training block, and --deepspeed-config for DeepSpeed's JSON file"
        ),
    ),
    Row(
        "--lr_schedule",
        "use --lr-decay: EE is warmup_exp_decay_exp; LE is exponential, with --lr-decay-rate "
        "decay_rate^(1/decay_step); EP is not there",
    ),
    Row("--job_name", "use --output-dir, another one for each run"),
    Row("--data_path_prefix --use_nvidia_dataset", "use --input-dir, a folder of HDF5 shards"),
    Row(
        "--load_training_checkpoint --load_checkpoint_id --load_cp --load_cp_id",
        "use --from-checkpoint to resume, --from-phase1-final-params between phases",
    ),
    Row("--model_file", "use --init-checkpoint, a model folder (convert_checkpoint.py makes one)"),
    Row("--use_pretrain", "use --init-checkpoint"),
    Row("--ckpt_to_save", "use --num-steps-per-checkpoint; the newest three are kept"),
    Row(
        "--deepspeed_transformer_kernel",
        "leave it out; see --compile layers, without --deepspeed",
    ),
    Row(
        "--attention_dropout_checkpoint --gelu_checkpoint --normalize_invertible",
        "use --activation-checkpoint selective or full",
    ),
    Row("--deepspeed_sparse_attention", "attention is dense or local (ModernBERT); leave it out"),
    Row("--progressive_layer_drop", "all layers are trained; leave it out"),
    Row(
        "--validation_data_path_prefix",
        "use --eval-dir, a folder of held-out shards",
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--do_lower_case",
        "the shards and --vocab-file say it; leave it out",
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--focal --gamma",
        "there is no focal loss: see --class-weights, or leave it out",
        programs=(FINE_TUNING,),
    ),
    # ModelCenter
    Row(
        "--model_config",
        "use --init-checkpoint, a Hugging Face folder",
        programs=(*TRAINING, INFERENCE),
    ),
    Row("--base_path", "use --data-dir or --input-dir for the data, and --output-dir"),
    Row("--max_encoder_length", "use --max-seq-length", programs=(*TRAINING, INFERENCE)),
    Row("--train_iters", "use --max-steps"),
    Row("--warmup_iters", "use --warmup-proportion, a share of all updates"),
    Row("--clip_grad", "use --max-grad-norm"),
    Row("--load", "use --init-checkpoint; for a run of this project, --resume-from-checkpoint"),
    Row("--save --save_name", "use --output-dir"),
    Row("--save_iters", "use --num-steps-per-checkpoint"),
    Row("--inspect_iters", "use --log-freq"),
    # Hugging Face
    Row("--group_by_length", "batches have no padding", is_accepted=True),
    Row(
        "--train_file --validation_file --dataset_name --dataset_config_name",
        (
            "make shards of your text (data/create_datasets_from_start.sh corpus FOLDER) "
            "and give them as --input-dir and --eval-dir"
        ),
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--dataset_name --dataset_config_name",
        (
            "data sets are files here: save it, for run_squad.py as SQuAD's JSON "
            "(data/prepare.py download squad), for others as CSV or JSON lines, and "
            "use --train-file and --eval-file"
        ),
        programs=(FINE_TUNING,),
    ),
    Row(
        "--eval_strategy --evaluation_strategy", "use --eval-steps N; without it the end is scored"
    ),
    Row("--save_strategy --logging_strategy", "use --num-steps-per-checkpoint, --log-freq"),
    Row(
        "--load_best_model_at_end",
        ("with --eval-steps the best checkpoint is kept, and read by inference.py; leave it out"),
    ),
    Row(
        "--report_to",
        "use --tensorboard-dir, --wandb-project or --report-file",
        unless=("none",),
    ),
    Row("--logging_dir", "use --tensorboard-dir, --wandb-project or --report-file"),
    Row(
        "--max_train_samples --max_predict_samples",
        "shorten the file, or use --max-steps",
    ),
    Row(
        "--max_eval_samples",
        "the whole file is scored: shorten it, or leave the flag out",
        programs=(FINE_TUNING,),
    ),
    Row("--do_regression", "use --regression", programs=(FINE_TUNING,)),
    Row(
        "--validation_split --test_size",
        "use run_glue.py --eval-fraction",
        programs=(FINE_TUNING,),
    ),
    Row("--patience", "use --early-stopping", programs=(FINE_TUNING,)),
    Row("--hidden_dropout_prob", "use --dropout"),
    Row("--checkpointing_steps", "use --num-steps-per-checkpoint"),
    Row("--with_tracking", "use --tensorboard-dir or --wandb-project"),
    Row("--load_in_8bit --load_in_4bit", "weights are float32; use --amp"),
    Row(
        "--gradient_checkpointing --gradient_checkpointing_kwargs",
        "use --activation-checkpoint full",
    ),
    Row("--warmup_steps --num_warmup_steps", "use --warmup-proportion, a share of all updates"),
    Row("--save_total_limit", "the newest three checkpoints are kept; leave it out", unless=("3",)),
    Row("--tokenizer_name", "use --vocab-file, a vocab.txt or tokenizer.json"),
    Row("--config_name", "use --config-file"),
    Row("--optim", "use --optimizer AdamW"),
    Row("--fsdp", "use --data-parallel-shard-degree -1"),
    Row("--torch_compile", "use --compile model"),
    Row("--do_eval", "use --eval-dir, a folder of held-out shards", programs=(PRE_TRAINING,)),
    Row(
        "--do_predict",
        "pre-training predicts nothing: leave it out, or see inference.py --fill-mask",
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--per_device_eval_batch_size --eval_batch_size",
        "evaluation has the batches of --batch-size; leave it out",
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--num_train_epochs",
        "use --max-steps: samples times epochs divided by the global batch",
        programs=(PRE_TRAINING,),
    ),
    Row(
        "--ignore_mismatched_sizes",
        "a head of another shape is left out, with a note",
        is_accepted=True,
    ),
    Row(
        "--return_entity_level_metrics",
        "scores.json has the scores of each type",
        is_accepted=True,
    ),
    Row(
        "--problem_type",
        (
            "use run_glue.py --task-name multi-label for several labels, --regression for "
            "numbers; one class is the default"
        ),
    ),
    Row("--data_seed --shuffle_seed", "use --seed, which also decides the order of samples"),
    Row("--full_determinism", "use --deterministic"),
    Row("--auto_find_batch_size", "use --estimate-memory to choose --batch-size"),
    Row(
        "--trust_remote_code",
        "code in model folders is never run; leave it out",
        unless=("false",),
        programs=(*TRAINING, INFERENCE),
    ),
    Row("--lr_scheduler_kwargs", "use --lr-decay and the flags of its schedule (see --help)"),
    Row("--optim_args", "use --beta1, --beta2, --epsilon and --weight-decay"),
    Row("--torch_compile_backend --torch_compile_mode", "use --compile model or layers"),
    Row("--run_name --project", "use --wandb-project, and --output-dir to tell runs apart"),
    Row("--eval_delay --eval_on_start", "use --eval-steps"),
    Row("--use_cpu --no_cuda", "use --device cpu", programs=(*TRAINING, INFERENCE)),
    Row(
        "--parallelism_config --fsdp_config --accelerator_config",
        "use the flags of parallel training (see --help)",
    ),
    Row("--ddp_timeout", "use --collective-timeout-minutes"),
    Row("--text_column_delimiter", "use --pair-column for the second text"),
    Row("--torch_dtype --dtype", "use --amp; weights are float32", programs=(*TRAINING, INFERENCE)),
    Row("--config_overrides --model_type", "use --config-file, a config.json"),
    Row("--overwrite_cache", "features are made at each start", is_accepted=True),
    Row(
        "--pad_to_max_length",
        "batches have no padding; leave it out",
        unless=("false", "true"),
    ),
    Row(
        "--push_to_hub", "use hf upload for a checkpoint's folder; leave it out", unless=("false",)
    ),
    Row("--adafactor", "use --optimizer AdamW"),
    Row("--model --model_path", "use --init-checkpoint", programs=(*TRAINING, INFERENCE)),
    Row("--scheduler", "use --lr-decay"),
    Row(
        "--task --task_type",
        "use --task-name of run_glue.py, or run_ner.py or run_embeddings.py",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--sentence1_key --anchor_column --query_column",
        "use --text-column",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--sentence2_key --text_pair --positive_column --passage_column --second_text_column "
        "--text_column_2 --text2_column --text_b_column",
        "use --pair-column",
        programs=(FINE_TUNING,),
    ),
    Row("--top_k --k", "use --n-best-size", programs=(INFERENCE,)),
    Row(
        "--file --predict_file --test_file",
        "use --input",
        programs=(INFERENCE,),
    ),
    # sentence-transformers
    Row(
        "--loss",
        (
            "use run_embeddings.py --embedding-loss contrastive (MultipleNegativesRankingLoss), "
            "cosent, cosine or margin-mse"
        ),
        programs=(FINE_TUNING,),
    ),
    Row(
        "--scale",
        "use run_embeddings.py --temperature, its inverse: scale 20 is temperature 0.05",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--prompts",
        "use run_embeddings.py --query-prompt and --document-prompt",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--mini_batch_size",
        "use --batch-size with --gradient-merge-steps: the loss is over the whole batch",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--pooling_mode --sentence_pooling_method",
        "use run_embeddings.py --pooling mean or first",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--truncate_dim",
        "use run_embeddings.py --matryoshka-dims for training",
        programs=(FINE_TUNING,),
    ),
    # FlagEmbedding
    Row(
        "--train_data",
        (
            "use run_embeddings.py --train-file with --text-column query --pair-column pos "
            "--negative-columns neg"
        ),
        programs=(FINE_TUNING,),
    ),
    Row(
        "--train_group_size",
        "use run_embeddings.py --num-negatives, which is one less",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--query_max_len --passage_max_len",
        "use --max-seq-length, which is that of all texts",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--query_instruction_for_retrieval --passage_instruction_for_retrieval",
        (
            "use run_embeddings.py --query-prompt and --document-prompt, and --prompt-column for "
            "the prompts of rows"
        ),
        programs=(FINE_TUNING,),
    ),
    Row(
        "--knowledge_distillation",
        "use run_embeddings.py --embedding-loss margin-mse",
        programs=(FINE_TUNING,),
    ),
    Row(
        "--normalize_embeddings --negatives_cross_device",
        "vectors are normalized, and negatives are those of all processes",
        is_accepted=True,
        programs=(FINE_TUNING,),
    ),
)


def foreign_flags(program: str) -> dict[str, ForeignFlag]:
    """The flags of other systems that a kind of program knows, by flag with hyphens, such as
    `--fuse-mha`.
    """
    flags = {}
    for row in TABLE:
        if program not in row.programs:
            continue
        for flag in row.names.replace("_", "-").split():
            flags[flag] = ForeignFlag(row.is_accepted, row.here, row.unless)
    return flags
