"""DeepSpeed's JSON: every key becomes a flag, goes to the engine, or is refused before anything
starts. Needs no DeepSpeed.
"""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import assert_refused
from deepspeed_flags import PRETRAINING, engine_flags, parse
from processes import environments
from small_runs import run_here

import run_glue
import run_pretraining
import run_squad
from bert_recipe.config import deepspeed_config
from bert_recipe.config.arguments import make_run_config, startup_messages
from bert_recipe.parallel.deepspeed import DeepSpeedModel
from bert_recipe.parallel.parallelize import check_parallel
from bert_recipe.training.plan import choose_strategies
from bert_recipe.training.run import TrainingValues
from bert_recipe.utils.errors import UserError

ADAMW = ("--optimizer", "AdamW")
LAMB = ("--optimizer", "Lamb")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """DeepSpeed seems to be there."""
    monkeypatch.setattr(deepspeed_config.importlib.metadata, "version", lambda _: "0.19.8")


@pytest.fixture
def world_size(monkeypatch):
    def set_world_size(count: int) -> None:
        for name, value in environments(count)[0].items():
            monkeypatch.setenv(name, value)

    return set_world_size


def uncorrected_adam(**config) -> dict:
    params = {"lr": 2e-4, "max_grad_norm": 0.5, "weight_decay": 0.01, "bias_correction": False}
    return {"steps_per_print": 1000, "optimizer": {"type": "Adam", "params": params}, **config}


def fp16(**keys) -> dict:
    return {"fp16": {"enabled": True, **keys}}


ALL_KEYS = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 100,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "wall_clock_breakdown": False,
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": 2e-4,
            "betas": [0.8, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "bias_correction": True,
        },
    },
}
# deepspeed_bsz64k_lamb_config_seq128.json of microsoft/DeepSpeedExamples, for 64 GPUs, without its
# sparse attention.
BING_BERT = {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "steps_per_print": 100,
    "prescale_gradients": False,
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    **fp16(loss_scale=0),
    "optimizer": {
        "type": "Lamb",
        "params": {
            "lr": 11e-3,
            "weight_decay": 0.01,
            "bias_correction": False,
            "max_coeff": 0.3,
            "min_coeff": 0.01,
        },
    },
}
OFF = {"enabled": False}
DISABLED = {
    "tensorboard": {**OFF, "output_path": "logs"},
    "wandb": {**OFF, "project": "bert"},
    "comms_logger": {**OFF, "verbose": True},
    "elasticity": {**OFF, "max_train_batch_size": 2000},
    "flops_profiler": {"profile_step": 1},
    "fp16": {"loss_scale": 128, "loss_scale_window": 1000},
}
FOUR_FLAGS = (
    "--epsilon",
    "1e-6",
    "--lamb-max-coeff",
    "3",
    "--lamb-adapt-undecayed=false",
    "--scale-loss",
    "64",
)
SIZES, DYNAMIC = "batch_size gradient_merge_steps", "scale_loss use_dynamic_loss_scaling"
# JSON, further flags, processes, program; names of arguments and their values.
HONOURED = {
    "all keys": (
        ALL_KEYS,
        (),
        1,
        run_pretraining,
        f"{SIZES} max_grad_norm log_freq optimizer learning_rate epsilon weight_decay beta1 beta2 "
        "use_pure_fp16 amp_dtype",
        (8, 4, 0.5, 100, "AdamW", 2e-4, 1e-8, 0.1, 0.8, 0.99, True, "bfloat16"),
    ),
    **{
        f"a batch of {program.__name__}": (
            {"train_batch_size": 24, "gradient_accumulation_steps": 3},
            ADAMW,
            1,
            program,
            SIZES,
            (8, 3),
        )
        for program in (run_squad, run_glue)
    },
    **{
        f"sizes {sizes}": (
            dict(zip(deepspeed_config.BATCH_KEYS, sizes, strict=False)),
            ADAMW,
            2,
            run_pretraining,
            SIZES,
            expected,
        )
        for sizes, expected in (
            ((64, 8), (8, 4)),
            ((64, "auto", 2), (16, 2)),
            ((64,), (32, 1)),
            (("auto", 8), (8, 1)),
            ((64, 8, "auto"), (8, 4)),
            ((), (32, 1)),
        )
    },
    **{
        f"loss scale {keys}": (
            fp16(**keys),
            ADAMW,
            1,
            run_pretraining,
            f"{DYNAMIC} amp_dtype",
            (*expected, "float16"),
        )
        for keys, expected in (
            ({"loss_scale": 128}, (128, False)),
            ({}, (2**16, True)),
            ({"loss_scale": 1}, (1, False)),
            ({"loss_scale": 0, "initial_scale_power": 12}, (4096, True)),
            ({"initial_scale_power": 0}, (1, True)),
        )
    },
    "bing_bert": (
        BING_BERT,
        (),
        64,
        run_pretraining,
        f"{SIZES} {DYNAMIC} lamb_min_coeff lamb_max_coeff lamb_bias_correction "
        "lamb_adapt_undecayed optimizer learning_rate epsilon",
        (64, 16, 2**16, True, 0.01, 0.3, False, True, "Lamb", 11e-3, 1e-8),
    ),
    "bing_bert's Adam": (  # deepspeed_bsz4096_adam_config.json
        uncorrected_adam(
            train_batch_size=4096, train_micro_batch_size_per_gpu=64, **fp16(loss_scale=0)
        ),
        (),
        64,
        run_pretraining,
        "max_grad_norm learning_rate epsilon weight_decay optimizer lamb_min_coeff lamb_max_coeff "
        "lamb_bias_correction",
        (0.5, 2e-4, 1e-8, 0.01, "Lamb", 1, 1, False),
    ),
    "bing_bert's SQuAD": (  # deepspeed_bsz24_config.json
        uncorrected_adam(train_batch_size=24, train_micro_batch_size_per_gpu=6, **fp16()),
        (),
        4,
        run_squad,
        f"{SIZES} {DYNAMIC}",
        (6, 1, 2**16, True),
    ),
    "DeepSpeed's defaults of Lamb": (
        {"optimizer": {"type": "Lamb"}},
        (),
        1,
        run_pretraining,
        "learning_rate epsilon weight_decay lamb_min_coeff lamb_max_coeff lamb_adapt_undecayed",
        (1e-3, 1e-8, 0, 0.01, 10, True),
    ),
    "DeepSpeed's defaults of Adam": (
        {"optimizer": {"type": "Adam"}},
        (),
        1,
        run_pretraining,
        "learning_rate epsilon weight_decay",
        (1e-3, 1e-8, 0),
    ),
    "flags instead of these defaults": (
        {"optimizer": {"type": "Lamb"}, **fp16()},
        FOUR_FLAGS,
        1,
        run_pretraining,
        "epsilon lamb_max_coeff lamb_adapt_undecayed scale_loss",
        (1e-6, 3, False, 64),
    ),
    **{
        f"TensorBoard {keys}": (
            {"tensorboard": {"enabled": True, **keys}},
            (),
            1,
            run_pretraining,
            "tensorboard_dir",
            (Path(folder),),
        )
        for keys, folder in (
            ({"output_path": "logs", "job_name": "bert"}, "logs/bert"),
            ({}, "DeepSpeedJobName"),
        )
    },
    "disabled blocks": (
        DISABLED,
        (),
        1,
        run_pretraining,
        f"{DYNAMIC} tensorboard_dir amp_dtype",
        (1.0, False, None, None),
    ),
}


@pytest.mark.parametrize("name", HONOURED)
def test_keys_become_flags_and_missing_ones_take_deepspeeds_defaults(tmp_path, world_size, name):
    config, flags, count, program, names, values = HONOURED[name]
    world_size(count)
    args = parse(tmp_path, config, *flags, program=program)
    assert tuple(getattr(args, name) for name in names.split()) == values


def test_the_engine_gets_its_own_keys(tmp_path, world_size):
    world_size(2)
    zero = {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "overlap_comm": "auto",
        "offload_param": {"device": "cpu"},
    }
    args = parse(
        tmp_path,
        {"zero_optimization": zero},
        *ADAMW,
        "--global-batch-size",
        "100",
        "--batch-size",
        "16",
    )
    config = make_run_config(args, 2)
    values = TrainingValues(config.loader, config.schedule, max_steps=1)
    parallel, _ = choose_strategies(config, values, Mock(), Mock(device=torch.device("cpu")))
    engine = parallel.engine.values
    expected = {"stage": 3, "reduce_bucket_size": 1000, "offload_param": {"device": "cpu"}}
    assert engine["zero_optimization"] == expected
    # 50 sequences of each process, at most 16 at a time.
    sizes = engine["train_micro_batch_size_per_gpu"], engine["gradient_accumulation_steps"]
    assert sizes == (config.loader.batch_size, 4)
    assert engine["gradient_clipping"] == args.max_grad_norm
    without = make_run_config(run_pretraining.parse_arguments([*PRETRAINING]), 2)
    assert without.parallel.engine is None


# Hugging Face's zero3.json, as its documentation of the Trainer has it.
FP16 = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def hugging_face(enabled: object) -> dict:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    auto = (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    )
    return {
        "fp16": {"enabled": enabled, **FP16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": ZERO3,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        **dict.fromkeys(auto, "auto"),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


@pytest.mark.parametrize("enabled", [False, "auto"])
def test_the_json_of_hugging_face_runs_as_published(tmp_path, enabled):
    args = parse(
        tmp_path,
        hugging_face(enabled),
        "--amp",
        "--learning-rate",
        "0.01",
        "--weight-decay",
        "0.1",
    )
    assert (args.optimizer, args.learning_rate, args.weight_decay, args.amp) == (
        "AdamW",
        0.01,
        0.1,
        True,
    )
    assert "the schedule is that of --lr-decay" in startup_messages(make_run_config(args))[-2]
    # "auto" is the flag's default, not DeepSpeed's.
    assert args.epsilon == parse(tmp_path, {}).epsilon
    assert not args.use_pure_fp16 and not args.use_dynamic_loss_scaling
    config = hugging_face(enabled)
    config["scheduler"]["params"]["warmup_num_steps"] = 10
    with pytest.raises(UserError, match=r"scheduler.type.*leave the block out"):
        parse(tmp_path, config)


@pytest.mark.parametrize(
    "enabled, flags",
    [(True, ()), ("auto", ("--fp16",)), ("auto", ("--use-pure-fp16", "--amp-dtype", "float16"))],
)
def test_the_loss_scaling_of_hugging_face_is_refused_where_fp16_is_on(tmp_path, enabled, flags):
    both = r"fp16.loss_scale_window 1000, fp16.hysteresis 2: .* 2000 .*leave the key out"
    with pytest.raises(UserError, match=both):
        parse(tmp_path, hugging_face(enabled), *flags)


def test_differences_from_deepspeeds_defaults_are_named(tmp_path):
    notes = startup_messages(make_run_config(parse(tmp_path, {"fp16": {"enabled": True}}, *ADAMW)))
    assert any("no gradient_clipping" in note and "--max-grad-norm 1" in note for note in notes)
    assert any("loss_scale_window 1000 and hysteresis 2" in note for note in notes)
    same = parse(
        tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}, "gradient_clipping": 1.0}, *ADAMW
    )
    automatic = parse(tmp_path, {"gradient_clipping": "auto"}, *ADAMW)
    for args in (same, automatic):
        assert not [note for note in startup_messages(make_run_config(args)) if "DeepSpeed" in note]


def params(**keys) -> dict:
    return {"optimizer": {"type": "Lamb", "params": keys}}


LAMB_ON_SHARDS = ("LAMB's trust ratios are wrong", "--data-parallel-shard-degree")
ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
REFUSED = {
    "LAMB by flag, ZeRO 1": (ZERO_1, LAMB, LAMB_ON_SHARDS),
    "another optimizer": (
        {"optimizer": {"type": "OneBitAdam"}},
        (),
        ("the optimizers are Adam, AdamW and Lamb",),
    ),
    "Muon": ({}, ("--optimizer", "Muon"), ("--optimizer Muon needs whole matrices", "AdamW")),
    "LAMB in the JSON": ({**ZERO_1, "optimizer": {"type": "LAMB"}}, (), LAMB_ON_SHARDS),
    "Adam without bias correction, ZeRO 1": (
        uncorrected_adam(**ZERO_1),
        (),
        ("bias_correction false", "stage 0"),
    ),
    "Adam without bias correction, and a flag": (
        uncorrected_adam(),
        ADAMW,
        ("bias_correction false (Adam without it is LAMB", "asks for --optimizer Lamb"),
    ),
    "two norms": (
        uncorrected_adam(gradient_clipping=1.0),
        (),
        ("max_grad_norm 0.5", "gradient_clipping 1.0"),
    ),
    "Weights & Biases": (
        {"wandb": {"enabled": True}},
        ADAMW,
        ("wandb.enabled", "--tensorboard-dir"),
    ),
    "prescaled gradients": (
        {"prescale_gradients": True},
        ADAMW,
        ("prescale_gradients True", "float32"),
    ),
    **{
        f"{key} {value!r}": (
            params(**{key: value}),
            (),
            (f"optimizer.params.{key} is {shown}", flag),
        )
        for key, value, shown, flag in (
            ("lr", "fast", "'fast'", "--learning-rate"),
            ("eps", 0, "0", "--epsilon"),
            ("weight_decay", True, "True", "--weight-decay"),
            ("max_coeff", [10], "[10]", "--lamb-max-coeff"),
            ("bias_correction", "no", "'no'", "--lamb-bias-correction"),
            ("min_coeff", -1, "-1", "--lamb-min-coeff"),
            ("betas", [0.9, 1], "1", "--beta2"),
        )
    },
    "a schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
        ADAMW,
        ("scheduler.type", "--warmup-proportion"),
    ),
    "an unknown key": (
        {"curriculum_learning": {"enabled": True}},
        ADAMW,
        ("curriculum_learning.enabled",),
    ),
    **{
        f"ZeRO {zero}": ({"zero_optimization": zero}, ADAMW, words)
        for zero, *words in (
            (
                {"stage": 1, "zero_quantized_weights": True},
                "zero_optimization.zero_quantized_weights",
            ),
            (True, "zero_optimization: write an object", "stage"),
            ({"stage": 4}, "zero_optimization.stage 4"),
            ({"stage": 2, "cpu_offload": True}, "offload_optimizer"),
            ({"stage": 3, "offload_param": {"device": "nvme"}}, "'nvme'", "cpu"),
            ({"offload_optimizer": {"device": "cpu"}}, "stage 1"),
            ({"stage": 2, "offload_param": {"device": "cpu"}}, "stage 3"),
        )
    },
    "another loss scaling": (
        {"fp16": {"enabled": True, "loss_scale_window": 1000}},
        ADAMW,
        ("fp16.loss_scale_window 1000", "2000"),
    ),
    "a scale that is a text": (
        {"fp16": {"enabled": True, "initial_scale_power": "16"}},
        ADAMW,
        ("'16'",),
    ),
    "both 16-bit types": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        ADAMW,
        ("bf16 and fp16",),
    ),
    "no clipping": ({"gradient_clipping": 0}, ADAMW, ("gradient_clipping 0",)),
    "another clipping": (
        {"gradient_clipping": 0.5},
        (*ADAMW, "--max-grad-norm", "1"),
        ("--max-grad-norm 0.5", "command line has 1.0"),
    ),
    "another learning rate": (
        params(lr=0.01),
        ("--learning-rate", "0.1"),
        ("--learning-rate 0.01",),
    ),
    "another optimizer than the flag's": (
        {"optimizer": {"type": "Adam"}},
        LAMB,
        ("--optimizer AdamW", "Lamb"),
    ),
    "another batch": (
        {"train_micro_batch_size_per_gpu": 8},
        (*ADAMW, "--batch-size", "16"),
        ("--batch-size 8", "16"),
    ),
    "a batch that does not divide": (
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
        ADAMW,
        ("train_batch_size 10", "train_micro_batch_size_per_gpu 4"),
    ),
    "another global batch": (
        {"train_batch_size": 64},
        (*ADAMW, "--global-batch-size", "32"),
        ("64", "is 32"),
    ),
    "a batch that is a text": ({"train_batch_size": "64"}, ADAMW, ("train_batch_size is '64'",)),
    "autocast and 16-bit weights": ({"bf16": {"enabled": True}}, (*ADAMW, "--amp"), ("--amp",)),
    **{
        words: ({}, (*ADAMW, *words.split()), (words.split()[0], "--deepspeed"))
        for words in (
            "--deterministic",
            "--profile-update 2",
            "--initial-global-batch-size 2 --batch-size-warmup-sequences 2",
            "--enable-cpu-offload",
            "--compile layers",
            "--estimate-memory",
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_before_anything_starts(tmp_path, name):
    config, flags, words = REFUSED[name]
    # None of the folders exists, so an error about them would say that something had started.
    assert_refused(run_here([*PRETRAINING, *engine_flags(tmp_path, config), *flags]), *words)
    assert list(tmp_path.iterdir()) == [tmp_path / "ds.json"]


@pytest.mark.parametrize(
    "flag", ["--data-parallel-shard-degree", "--data-parallel-replicate-degree"]
)
def test_fsdps_degrees_are_refused_beside_the_engine(tmp_path, world_size, flag):
    world_size(2)
    config = make_run_config(parse(tmp_path, {}, *ADAMW, flag, "2"))
    with pytest.raises(UserError, match=f"{flag} cannot be combined with --deepspeed"):
        check_parallel(config, torch.device("cpu"))


def test_an_experimental_optimizer_is_refused_beside_the_engine(tmp_path):
    config = make_run_config(parse(tmp_path, {}, "--optimizer", "FusedLAMB"))
    [sentence] = DeepSpeedModel.unsupported(config, torch.device("cuda"))
    assert "--optimizer FusedLAMB cannot be combined with --deepspeed" in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "lr": 1e-4}}}',
            "the key 'lr' is given twice",
        ),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "not valid JSON"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": NaN}}}', "optimizer.params.lr is nan"),
        ('{"zero_optimization": {"stage": [2]}}', "zero_optimization.stage [2]"),
        ("[]", "expected an object"),
    ],
)
def test_hostile_json_is_one_error_that_names_the_file(tmp_path, text, words):
    flags = engine_flags(tmp_path, {})
    (tmp_path / "ds.json").write_text(text)
    assert_refused(run_here([*PRETRAINING, *flags, *ADAMW]), "ds.json", words)


def test_prediction_alone_is_refused(tmp_path, capsys):
    predict = (
        "--do-predict",
        "--predict-file",
        "dev.json",
        "--init-checkpoint",
        "model",
        "--output-dir",
        "results",
    )
    with pytest.raises(SystemExit):
        run_squad.parse_arguments([*predict, *engine_flags(tmp_path, {})])
    assert "--deepspeed has no effect without --do-train" in capsys.readouterr().err


def test_without_deepspeed_one_line_says_what_to_install(tmp_path, monkeypatch):
    error = deepspeed_config.importlib.metadata.PackageNotFoundError
    monkeypatch.setattr(deepspeed_config.importlib.metadata, "version", Mock(side_effect=error))
    result = run_here([*PRETRAINING, *engine_flags(tmp_path, {}), *ADAMW])
    assert_refused(result, "needs DeepSpeed", "requirements-deepspeed.txt")
