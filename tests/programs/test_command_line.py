"""Command lines: the forms of a flag, the one-line errors of wrong, contradicting and useless
flags, and flags of other systems.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import create_pretraining_data
import inference
import run_embeddings
import run_glue
import run_ner
import run_pretraining
import run_squad
from bert_recipe.config import FINE_TUNING, FLAG_GROUPS, PRE_TRAINING, RunConfig
from bert_recipe.config.arguments import make_run_config, startup_messages
from bert_recipe.config.foreign_flags import INFERENCE, foreign_flags
from bert_recipe.utils.command_line import ArgumentParser, BooleanFlag
from data import prepare


def parser(program, words: str = "") -> Callable:
    """Parses a command line that begins with `words`."""
    return lambda *more: program.parse_arguments([*words.split(), *more])


pretraining = parser(run_pretraining, "--input-dir i --output-dir o --max-steps 5")
bare, data = parser(run_pretraining), parser(prepare)
creation = SimpleNamespace(parse_arguments=create_pretraining_data.main)
creation = parser(creation, "--input-dir i --output-dir o --vocab-file v")
squad = parser(run_squad, "--output-dir o --init-checkpoint m --do-train --train-file t")
squad_prediction = parser(
    run_squad, "--output-dir o --init-checkpoint m --do-predict --predict-file dev.json"
)
table = parser(
    run_glue, "--output-dir o --do-train --train-file t.csv --text-column a --label-column b"
)
entities = parser(run_ner, "--output-dir o --do-train --train-file t.conll")
embeddings = parser(
    run_embeddings,
    "--output-dir o --do-train --train-file t.csv --text-column a --pair-column b",
)
glue = parser(run_glue, "--output-dir o --init-checkpoint m --task-name mrpc --data-dir d")


def error_of(parse: Callable, words: list[str], capsys) -> str:
    """The line that the parser prints for the wrong command line `words`."""
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert caught.value.code == 2 and line.startswith("error: ") and captured.out == ""
    return line


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("hyphen", ["-", "_"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *((["--use-it", *word], True) for word in ([], ["true"], ["True"], ["yes"])),
        (["--use-it=1"], True),
        *((["--use-it", word], False) for word in ("false", "0")),
        (["--no-use-it"], False),
        (["--no-use-it", "true"], False),
        (["--no-use-it=false"], True),
        (["--use-it", "--no-use-it"], False),
        (["--no-use-it", "--use-it"], True),
    ],
    ids=str,
)
def test_boolean_flag_accepts_every_form(default, hyphen, words, expected):
    boolean = ArgumentParser()
    boolean.add_argument("--use-it", action=BooleanFlag, default=default)
    assert boolean.parse_args([]).use_it is default
    assert (
        boolean.parse_args([word.replace("e-i", f"e{hyphen}i") for word in words]).use_it
        is expected
    )


def test_underscores_in_flag_names_are_hyphens_and_values_keep_theirs():
    args = pretraining(
        "--output_dir", "my_out", "--max_steps=7", "--model_prefix=my_model", "--beta1", "0.5"
    )
    assert (args.output_dir, args.max_steps, args.model_prefix, args.beta1) == (
        Path("my_out"),
        7,
        "my_model",
        0.5,
    )
    with pytest.raises(AttributeError, match="frozen"):
        args.seed = 1


def prediction(*words: str):
    return inference.parse_arguments(["--init-checkpoint", "x", "--text", "a", *words])


@pytest.mark.parametrize(
    ("parse", "program"),
    [
        (pretraining, PRE_TRAINING),
        (table, FINE_TUNING),
        (squad, FINE_TUNING),
        (prediction, INFERENCE),
    ],
)
def test_no_answer_stands_for_a_flag_that_the_program_has(parse, program):
    own = {name for flag in parse()._flags.values() for name in flag.names}
    own = {name.replace("_", "-") for name in own}
    # NVIDIA's batch is that of an update.
    assert own & foreign_flags(program).keys() <= {"--train-batch-size"}


# The flags that the scripts of NVIDIA's PyTorch recipe and of DeepSpeed's bing_bert give.
NVIDIA_PRETRAINING = (
    "--input_dir d --output_dir o --config_file c --vocab_file v --train_batch_size 8 "
    "--max_seq_length 128 --max_predictions_per_seq 20 --max_steps 5 --warmup_proportion 0.1 "
    "--num_steps_per_checkpoint 5 --learning_rate 1e-3 --seed 1 --fp16 --do_train --phase2 "
    "--gradient_accumulation_steps 2 --allreduce_post_accumulation "
    "--allreduce_post_accumulation_fp16 --resume_from_checkpoint --phase1_end_step 7 "
    "--init_checkpoint m --json-summary j --disable_progress_bar --num_workers 4 --log_freq 1 "
    "--steps_this_run 5 --local_rank 0 --do_lower_case"
)
NVIDIA_SQUAD = (
    "--init_checkpoint m --do_train --train_file t --train_batch_size 8 --do_predict "
    "--predict_file p --predict_batch_size 8 --eval_script e --do_eval --do_lower_case "
    "--bert_model bert-large-uncased --learning_rate 1e-5 --warmup_proportion 0.1 --seed 1 "
    "--num_train_epochs 2 --max_seq_length 384 --doc_stride 128 --output_dir o --vocab_file v "
    "--config_file c --max_steps 5 --fp16"
)
NVIDIA_GLUE = (
    "--init_checkpoint m --data_dir d --task_name mrpc --do_train --train_batch_size 8 --do_eval "
    "--do_predict --eval_batch_size 8 --do_lower_case --bert_model bert-large-uncased --seed 1 "
    "--learning_rate 1e-5 --warmup_proportion 0.1 --num_train_epochs 3 --max_seq_length 128 "
    "--vocab_file v --config_file c --output_dir o --max_steps 5 --fp16 "
    "--gradient_accumulation_steps 2"
)
NVIDIA_INFERENCE = (
    "--bert_model bert-large-uncased --init_checkpoint m --config_file c --vocab_file v "
    "--question q --context t"
)
BING_BERT_PRETRAINING = (
    "--cf c --max_seq_length 512 --output_dir o --deepspeed --deepspeed_config d --print_steps 10 "
    "--deepspeed_transformer_kernel --lr_schedule EE --lr_offset 0 --job_name j --rewarmup "
    "--data_path_prefix p --use_nvidia_dataset --validation_data_path_prefix v "
    "--load_training_checkpoint l --load_checkpoint_id i --attention_dropout_checkpoint "
    "--deepspeed_sparse_attention --progressive_layer_drop"
)
BING_BERT_SQUAD = (
    "--bert_model bert-large-uncased --do_train --do_lower_case --predict_batch_size 3 "
    "--do_predict --train_file t --predict_file p --train_batch_size 3 --learning_rate 1e-5 "
    "--num_train_epochs 2 --max_seq_length 384 --doc_stride 128 --output_dir o --job_name j "
    "--gradient_accumulation_steps 1 --fp16 --deepspeed --deepspeed_config d --dropout 0.1 "
    "--model_file m --seed 1 --preln --deepspeed_transformer_kernel"
)


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (run_pretraining, NVIDIA_PRETRAINING),
        (run_squad, NVIDIA_SQUAD),
        (run_glue, NVIDIA_GLUE),
        (inference, NVIDIA_INFERENCE),
        (run_pretraining, BING_BERT_PRETRAINING),
        (run_squad, BING_BERT_SQUAD),
    ],
)
def test_each_flag_of_the_scripts_of_nvidia_and_bing_bert_is_read_or_answered(
    program, command, capsys
):
    line = error_of(parser(program, command), ["--no-such-flag"], capsys)
    _, _, unknown = line.partition("unrecognized arguments: ")
    assert unknown.startswith(("--no-such-flag (", "--no-such-flag; "))


def test_bf16_is_amp_and_goes_with_no_other_type(capsys):
    assert table("--bf16").amp and prediction("--bf16").amp
    assert make_run_config(pretraining("--bf16")).precision.amp_dtype == "bfloat16"
    for flags in ("--fp16", "--amp-dtype float16", "--scale-loss 8"):
        assert "--bf16 computes in bfloat16" in error_of(table, ["--bf16", *flags.split()], capsys)


def test_flags_of_trainer_that_ask_for_what_is_done_anyway_are_read(capsys):
    words = "--report_to none --save_total_limit 3 --pad_to_max_length False --overwrite_cache "
    words += "--return_entity_level_metrics --ignore_mismatched_sizes --trust_remote_code=False "
    words += "--task_name sst2 --data-dir x --init-checkpoint x --output-dir x --do-eval"
    assert run_glue.parse_arguments(words.split()).task_name == "sst-2"
    for flag in ("--report_to wandb", "--save_total_limit 1", "--trust_remote_code"):
        assert f"{flag.split()[0].replace('_', '-')} is not a flag" in (
            error_of(table, flag.split(), capsys)
        )


VALUES = {
    "label_smoothing": "0.1",
    "train_file": "x",
    "lr_decay": "linear",
    "model_prefix": "x",
    "activation_checkpoint": "full",
}
VALUES |= {
    "compile": "layers",
    "resume_from_checkpoint": "true",
    "overwrite": "true",
    "beta1": "0.5",
    "beta2": "0.5",
}
VALUES |= {"warmup_proportion": "0.5", "lr_decay_rate": "0.5", "dropout": "0.5"}


def training_flags() -> list[str]:
    flags = squad()._flags
    names = [
        name
        for name, flag in flags.items()
        if "--do-train" in flag.needs and not name.startswith("deepspeed")
    ]
    assert len(names) > 30
    return names


@pytest.mark.parametrize("name", training_flags())
def test_flags_of_training_are_refused_without_training(name, capsys):
    flag = "--" + name.replace("_", "-")
    words = [
        flag,
        VALUES.get(name, "1"),
        *(("--optimizer", "Lamb") if name.startswith("lamb") else ()),
    ]
    for parse, mode in ((squad_prediction, []), (glue, ["--do-eval"])):
        assert f"{flag} has no effect without --do-train" in error_of(
            parse, [*mode, *words], capsys
        )


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (pretraining, "--overwrite false --benchmark --last-step-of-checkpoint None --eval-dir e"),
        (squad_prediction, "--overwrite false"),
        (entities, "--do-eval --eval-fraction 0.1"),  # which run_glue.py has beside --data-dir
        # As NVIDIA's run_squad.sh has them for mode eval.
        (
            squad_prediction,
            "--optimizer=AdamW --log-freq=100 --do-lower-case --seed=1 --max-seq-length=384 --amp "
            "--use-dynamic-loss-scaling --scale-loss=128.0 --predict-batch-size=32 --do-eval",
        ),
    ],
)
def test_flags_that_ask_for_nothing_or_that_other_recipes_always_give_are_accepted(parse, words):
    parse(*words.split())


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        pretraining("--help")
    help_text = capsys.readouterr().out
    text = " ".join(help_text.split())
    assert caught.value.code == 0
    required = "--input-dir INPUT_DIR --max-steps MAX_STEPS --output-dir OUTPUT_DIR"
    assert f" {required} [FLAG ...] Pre-trains" in text
    assert run_pretraining.__doc__ in help_text
    assert "--batch-size, --train-batch-size, --per-device-train-batch-size BATCH_SIZE" in text
    assert "(default: 42)" in text and "(default: 1e-06)" in text and "--no-amp" in text
    assert "default: None" not in text
    assert "falls by less than 1% in 50 updates" in text  # no format of argparse


def test_names_of_hugging_face_are_aliases():
    words = (
        "--per_device_train_batch_size 8 --lr 1e-5 --num_train_epochs 2 --warmup_ratio 0.2 "
        "--logging_steps 5"
    )
    config = make_run_config(
        squad(*words.split(), "--save_steps", "7", "--adam_epsilon", "1"), world_size=2
    )
    assert (config.loader.batch_size, config.loader.global_batch_size, config.trainer.epochs) == (
        8,
        16,
        2,
    )
    assert (config.schedule.learning_rate, config.schedule.warmup_proportion) == (1e-5, 0.2)
    assert (config.trainer.log_freq, config.trainer.steps_per_checkpoint, config.optimizer.eps) == (
        5,
        7,
        1,
    )


def test_the_record_of_a_run_has_the_flags_that_change_results():
    flags = pretraining("--amp", "--lr", "0.5").tagged("result")
    assert (
        flags["--learning-rate"] == 0.5
        and flags["--amp"] is True
        and flags["--lr-rewarmup"] is False
    )
    assert not {"--seed", "--num-workers", "--output-dir", "--compile", "--log-freq"} & flags.keys()
    others = flags.keys() - squad().tagged("result").keys()
    assert {
        "--lr-rewarmup",
        "--masked-lm-prob",
        "--whole-word-mask",
        "--initial-global-batch-size",
    } <= others


def test_settings_have_flags():
    """What is decided later is in training/run.py."""
    without = []
    for config in (*itertools.chain(*FLAG_GROUPS.values()), RunConfig):
        for member in dataclasses.fields(config):
            is_group = isinstance(member.type, type) and dataclasses.is_dataclass(member.type)
            if not member.metadata and not is_group:
                without.append(f"{config.__name__}.{member.name}")
    assert {*without} == {"RunConfig.world_size", "RunConfig.arguments", "ParallelConfig.engine"}


def test_settings_are_printed_as_far_as_asked_for():
    def messages(*words: str) -> list[str]:
        return startup_messages(make_run_config(pretraining(*words)))

    given = "--input-dir i --output-dir o --max-steps 5 --lr 0.5"
    assert messages("--lr", "0.5", "--seed", "42") == [
        f"settings that differ from the defaults: {given}"
    ]
    assert messages("--no-show-config") == []
    flags = "--task-name", "multi-label", "--label-column", "d", "b c"
    (typed,) = startup_messages(make_run_config(table(*flags)))
    assert "--label-column d 'b c'" in typed
    for words in ("--no-shrink-outputs", "--no-shrink-outputs True", "--shrink-outputs no"):
        args = table(*words.split())
        assert "--shrink-outputs False" in startup_messages(make_run_config(args))[0]
        _, _, *typed_again = args.command().split()  # on model cards
        assert "--shrink-outputs" in typed_again and not table(*typed_again).shrink_outputs
    (everything,) = messages("--show-config")
    assert "--num-workers" in everything and len(everything.splitlines()) > 60


@pytest.mark.parametrize(
    ("parse", "words", "same"),
    [
        (pretraining, "--do_train --fuse-mha --no_dense_sequence_output", ""),
        (pretraining, "--allreduce_post_accumulation_fp16 true --delay_allreduce", ""),
        (pretraining, "--print_steps 7 --preln", "--log-freq 7 --pre-layer-norm"),
        (table, "--model_name_or_path m --max_steps -1.0", "--init-checkpoint m --max-steps -1"),
        (table, "--test_file new.csv --do-predict", "--predict-file new.csv --do-predict"),
        (table, "--validation_file=dev.csv --do-eval", "--eval-file=dev.csv --do-eval"),
        (table, "--text_column_name c --label_column_name=d", "--text-column c --label-column d"),
        (
            table,
            "--lr_scheduler_type cosine --max_length 64",
            "--lr-decay cosine --max-seq-length 64",
        ),
    ],
)
def test_a_flag_of_another_system_is_read_as_the_one_here_or_does_nothing(parse, words, same):
    assert parse(*words.split()).as_dict() == parse(*same.split()).as_dict()


@pytest.mark.parametrize(
    ("parse", "words", "advice"),
    [
        (
            bare,
            "--train_file a --mlm_probability 0.1 --save_total_limit 2 --optim a",
            [
                "data/create_datasets_from_start.sh corpus",
                "newest three",
                "use --optimizer AdamW",
            ],
        ),
        (
            bare,
            "--cf a --lr_schedule EE --job_name b --data_path_prefix d "
            "--deepspeed_transformer_kernel --load_training_checkpoint c --no-such-flag",
            [
                "bert_model_config",
                "warmup_exp_decay_exp",
                "--output-dir",
                "--input-dir",
                "--compile",
                "--from-checkpoint",
                "unrecognized arguments: --no-such-flag (see",
            ],
        ),
        (
            bare,
            "--skip_checkpoint --n_gpu 8 --train_batch_size 8",
            ["--num-steps-per-checkpoint", "torchrun --nproc-per-node=N", "per GPU and update"],
        ),
        (
            parser(run_glue),
            "--eval_strategy steps --load_best_model_at_end --report_to all "
            "--max_train_samples 9 --dataset_name imdb --model_file f",
            [
                "--eval-steps",
                "best checkpoint",
                "--tensorboard-dir",
                "--max-steps",
                "--train-file",
                "--init-checkpoint",
            ],
        ),
        (
            parser(inference),
            "--bert_model bert-large-uncased --fp16 --no_gpu",
            ["the folder", "--amp", "--device cpu"],
        ),
        (creation, "--output_file a.hdf5", ["--output-dir"]),
        (
            parser(run_glue),
            "--model m --task ner --anchor_column a --positive_column b",
            ["--init-checkpoint", "--task-name", "--text-column", "--pair-column"],
        ),
        (
            parser(inference),
            "--model m --top_k 5 --file a.csv --predict_file b.csv",
            ["--init-checkpoint", "--n-best-size", "use --input"],
        ),
        (bare, "", ["--input-dir", "--output-dir", "--max-steps"]),
        (
            bare,
            "--max-step 9 --warmup-ratios 0.1",
            [
                "--max-step: did you mean --max-steps?",
                "--warmup-ratios: did you mean --warmup-ratio?",
            ],
        ),
    ],
)
def test_one_message_answers_all_flags_of_a_command_line(parse, words, advice, capsys):
    error = error_of(parse, words.split(), capsys)
    assert all(text in error for text in advice), error


@pytest.mark.parametrize(
    ("parse", "typed", "meant"),
    [
        (parser(run_glue), "--text-pair-column", "--text-column or --pair-column"),
        (parser(run_glue), "--column-pair", "--pair-column"),
        (parser(run_glue), "--batch-size-train", "--train-batch-size"),
        (parser(run_glue), "--best-metric-for-model", "--metric-for-best-model"),
        (parser(run_glue), "--trainfile", "--train-file"),
        (parser(run_glue), "--label-col", "--label-column"),
        (parser(run_glue), "--lerning-rate", "--learning-rate"),
        (pretraining, "--eval-directory", "--eval-dir"),
        (parser(run_glue), "--model-checkpoint", None),  # not --from-checkpoint
        (parser(run_ner), "--tag-column", None),  # not --text-column
        (pretraining, "--wandb-run", None),
        (parser(run_glue), "--num", None),  # begins too many
    ],
)
def test_an_unknown_flag_is_answered_with_those_that_have_its_words(parse, typed, meant, capsys):
    _, _, suggestion = error_of(parse, [typed, "x"], capsys).partition(": did you mean ")
    assert suggestion.partition("?")[0] == (meant or "")


@pytest.mark.parametrize("page", ["hugging_face", "sentence_transformers"])
def test_every_flag_that_a_page_names_as_the_counterpart_exists(page):
    training = (pretraining, table, entities, embeddings, squad)
    parsers = (*training, parser(inference, "--init-checkpoint m --text a"))
    own = {name for parse in parsers for flag in parse()._flags.values() for name in flag.names}
    text = (ROOT / "docs" / f"coming_from_{page}.md").read_text(encoding="utf-8")
    rows = [line.split("|", 2)[2] for line in text.splitlines() if line.startswith("| ")]
    named = {flag for row in rows for flag in re.findall(r"`[^`]*`", row)}
    flags = {flag for text in named for flag in re.findall(r"--[a-z][a-z0-9-]+", text)}
    assert len(flags) > 15 and flags - own <= {"--dynamic-masking"}  # of data creation
