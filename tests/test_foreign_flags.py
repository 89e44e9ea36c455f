"""Flags of other systems: what they become, and what is said of them."""

import pytest

import create_pretraining_data
import inference
import run_glue
import run_pretraining

PRETRAINING = ["--input-dir", "shards", "--output-dir", "out", "--max-steps", "9"]
GLUE = ["--do-train", "--train-file", "train.csv", "--output-dir", "out", "--text-column", "a", "--label-column", "b"]


@pytest.mark.parametrize(
    ("program", "words", "same"),
    [
        (run_pretraining, "--do_train --fuse-mha --no_dense_sequence_output", ""),
        (run_pretraining, "--allreduce_post_accumulation_fp16 true --delay_allreduce", ""),
        (run_pretraining, "--print_steps 7 --preln", "--log-freq 7 --pre-layer-norm"),
        (run_glue, "--model_name_or_path model", "--init-checkpoint model"),
        (run_glue, "--test_file new.csv --do-predict", "--predict-file new.csv --do-predict"),
        (run_glue, "--validation_file=dev.csv --do-eval", "--eval-file=dev.csv --do-eval"),
        (run_glue, "--text_column_name c --label_column_name=d", "--text-column c --label-column d"),
        (run_glue, "--lr_scheduler_type cosine --max_length 64", "--lr-decay cosine --max-seq-length 64"),
    ],
)
def test_a_flag_of_another_system_is_read_as_the_one_here_or_does_nothing(program, words, same):
    base = PRETRAINING if program is run_pretraining else GLUE
    found, expected = (program.parse_arguments([*base, *text.split()]) for text in (words, same))
    assert found.as_dict() == expected.as_dict()


@pytest.mark.parametrize(
    ("program", "words", "advice"),
    [
        (run_pretraining, "--train_file a.txt --mlm_probability 0.1 --line_by_line --save_total_limit 3 --bf16",
         ["data/create_datasets_from_start.sh corpus", "leave it out", "newest three", "use --amp"]),
        (run_pretraining, "--cf a --lr_schedule EE --job_name b --data_path_prefix d --deepspeed_transformer_kernel "
         "--load_training_checkpoint c --no-such-flag",
         ["bert_model_config", "warmup_exp_decay_exp", "--output-dir", "--input-dir", "--compile", "--from-checkpoint",
          "unrecognized arguments: --no-such-flag (see"]),
        (run_pretraining, "--skip_checkpoint --n_gpu 8 --train_batch_size 8",
         ["--num-steps-per-checkpoint", "torchrun --nproc-per-node=N", "per GPU and update"]),
        (run_glue, "--eval_strategy steps --load_best_model_at_end --metric_for_best_model f1 --report_to all "
         "--max_train_samples 9 --dataset_name imdb --model_file f",
         ["--eval-steps", "best checkpoint", "the task's metric", "--tensorboard-dir", "--max-steps", "--train-file",
          "--init-checkpoint"]),
        (inference, "--bert_model bert-large-uncased --fp16 --no_gpu", ["the folder", "float32", "--device cpu"]),
        (create_pretraining_data, "--output_file a.hdf5", ["--output-dir"]),
        (run_pretraining, "--max-step 9 --warmup-ratios 0.1",
         ["--max-step: did you mean --max-steps?", "--warmup-ratios: did you mean --warmup-ratio?"]),
    ],
)  # fmt: skip
def test_one_message_answers_all_flags_of_a_command_line(program, words, advice, capsys):
    with pytest.raises(SystemExit):
        (program.main if program is create_pretraining_data else program.parse_arguments)(words.split())
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for text in advice:
        assert text in error


def test_a_flag_that_is_not_close_gets_no_suggestion(capsys):
    with pytest.raises(SystemExit):
        run_pretraining.parse_arguments([*PRETRAINING, "--wandb-run"])
    assert "did you mean" not in capsys.readouterr().err
