"""Flags of the programs of DeepSpeed's bing_bert and of ModelCenter: each one is a flag here, or
has an answer.
"""

import pytest

import run_glue
import run_pretraining

BING_BERT = """cf output_dir max_seq_length max_predictions_per_seq max_pred seed
do_lower_case local_rank use_pretrain refresh_bucket_size finetune lr_schedule lr_offset
load_training_checkpoint load_cp load_checkpoint_id load_cp_id job_name rewarmup max_steps
max_steps_per_epoch print_steps data_path_prefix validation_data_path_prefix
deepspeed_transformer_kernel stochastic_mode ckpt_to_save attention_dropout_checkpoint
normalize_invertible gelu_checkpoint use_nvidia_dataset deepspeed_sparse_attention
progressive_layer_drop"""
BING_BERT_GLUE = """data_dir bert_model task_name output_dir cache_dir max_seq_length
do_train do_eval do_lower_case train_batch_size eval_batch_size learning_rate
num_train_epochs warmup_proportion no_cuda local_rank seed gradient_accumulation_steps fp16
deepscale loss_scale server_ip server_port model_file random focal gamma
deepspeed_sparse_attention deepspeed_transformer_kernel progressive_layer_drop preln"""
MODEL_CENTER = """model-config base-path dataset_name load save save-name save-iters
inspect-iters batch-size clip-grad train-iters max-length max-encoder-length
max-decoder-length start-step seed epochs lr weight-decay loss-scale warmup-iters
lr-decay-iters lr-decay-style local_rank"""


@pytest.mark.parametrize(
    ("program", "names"),
    [(run_pretraining, BING_BERT), (run_glue, BING_BERT_GLUE), (run_glue, MODEL_CENTER)],
    ids=["bing_bert", "bing_bert's GLUE", "ModelCenter"],
)
def test_every_flag_has_an_answer(program, names, capsys):
    words = [f"--{name}" for name in names.split()]
    with pytest.raises(SystemExit):
        program.parse_arguments([*words, "--no-such-flag"])
    *_, unknown = capsys.readouterr().err.partition("unrecognized arguments: ")
    assert unknown.startswith("--no-such-flag (see ")
