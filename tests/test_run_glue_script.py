"""scripts/run_glue.sh: what each argument and preset becomes."""

from pathlib import Path

import pytest
from launch_scripts import Checkout, assert_refused, glue_run, presets, processes_of


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_each_position_reaches_the_flag_of_its_name(checkout):
    config, vocab = "bert_configs/bert-mini-uncased.json", "vocab/bert-base-uncased-vocab.txt"
    result = checkout.run(
        f"bash scripts/run_glue.sh init data/download/glue/CoLA {vocab} {config} out CoLA 0 8 2 5e-5 0.3 2.5 7 fp32 6 "
        "'train eval prediction'"
    )
    assert result.returncode == 0, result.stderr
    run = glue_run(checkout)
    assert (run.from_pretrained_params, run.data_dir) == (Path("init"), Path("data/download/glue/CoLA"))
    assert (run.vocab_file, run.config_file, run.output_dir) == (Path(vocab), Path(config), Path("out"))
    assert (run.task_name, run.device, run.seed, run.max_steps, run.epochs) == ("cola", "cpu", 6, 7, 2.5)
    # NVIDIA's batch size is that of an update: the accumulation steps divide it.
    assert (run.batch_size, run.gradient_merge_steps, run.predict_batch_size) == (4, 2, 8)
    assert (run.learning_rate, run.warmup_proportion, run.amp) == (5e-5, 0.3, False)
    assert (run.do_train, run.do_eval, run.do_predict) == (True, True, True)
    assert run.resume_from_checkpoint


def test_the_defaults_are_nvidias(checkout):
    assert checkout.run("bash scripts/run_glue.sh init").returncode == 0
    run = glue_run(checkout)
    assert (run.task_name, run.output_dir, run.epochs, run.max_steps) == ("mrpc", Path("results/MRPC"), 3, -1)
    assert (run.batch_size, run.gradient_merge_steps, run.learning_rate) == (16, 1, 2.4e-5)
    assert (run.warmup_proportion, run.seed, run.amp_dtype) == (0.1, 2, "float16")
    assert (run.use_dynamic_loss_scaling, run.scale_loss) == (True, 128)
    assert (run.do_train, run.do_eval, run.do_predict) == (True, True, False)
    assert processes_of(checkout.calls()[0]) == 8
    assert run.report_file == Path("results/MRPC/dllogger_8_fp16.json")
    assert (checkout.folder / "results" / "MRPC" / "logfile.txt").is_file()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_arguments_it_downloads_a_model_and_a_task_and_uses_this_machine(checkout, has_gpu):
    commands = {
        "hf": 'mkdir "$4"; echo "hf $*" >>hf_calls',
        "nvidia-smi": "echo 'GPU 0: H200'" if has_gpu else "exit 9",
    }
    for name, content in commands.items():
        (checkout.folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (checkout.folder / "bin" / name).chmod(0o755)
    (checkout.folder / "data" / "download" / "glue" / "MRPC").rmdir()
    result = checkout.run("bash scripts/run_glue.sh")  # nothing has come: the fake python3 only records
    assert result.returncode == 2 and "MRPC does not exist" in result.stderr
    hf_call = "hf download google-bert/bert-base-uncased --local-dir bert-base-uncased\n"
    assert (checkout.folder / "hf_calls").read_text() == hf_call
    (download,) = checkout.calls()
    assert download[0].endswith("data/prepare.py") and download[1:] == ["download", "glue", "--tasks", "mrpc"]
    checkout.calls_file.unlink()
    (checkout.folder / "data" / "download" / "glue" / "MRPC").mkdir()
    assert checkout.run("bash scripts/run_glue.sh").returncode == 0
    run = glue_run(checkout)
    assert (checkout.folder / "hf_calls").read_text() == hf_call
    assert (run.from_pretrained_params, run.task_name) == (Path("bert-base-uncased"), "mrpc")
    assert (run.device, run.use_dynamic_loss_scaling) == (("cuda", True) if has_gpu else ("cpu", False))


def test_without_the_model_and_hf_the_command_is_named(checkout):
    path = f"{checkout.folder / 'bin'}:/usr/bin:/bin"
    assert_refused(
        checkout.run("bash scripts/run_glue.sh", PATH=path), checkout, "pip install huggingface_hub", "hf dow"
    )


def test_minus_one_may_be_written_as_nvidia_writes_it_and_more_flags_may_follow(checkout):
    command = "bash scripts/run_glue.sh init '' '' '' '' '' 1 '' '' '' '' '' -1.0 amp"
    assert checkout.run(command, EXTRA_ARGS="--num-seeds 5").returncode == 0
    run = glue_run(checkout)
    assert (run.max_steps, run.num_seeds, run.amp) == (-1, 5, True)


@pytest.mark.parametrize(
    ("mode", "tasks"),
    [
        ("train", (True, False, False)),
        ("eval", (False, True, False)),
        ("prediction", (False, False, True)),
        ("'train eval'", (True, True, False)),
        ("eval_prediction", (False, True, True)),
    ],
)
def test_a_mode_does_what_its_name_says(checkout, mode, tasks):
    result = checkout.run(f"bash scripts/run_glue.sh init '' '' '' '' '' 1 '' '' '' '' '' '' amp '' {mode}")
    assert result.returncode == 0, result.stderr
    run = glue_run(checkout)
    assert (run.do_train, run.do_eval, run.do_predict) == tasks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere", ["init_checkpoint", "nowhere does not exist: check the path\n"]),
        ("init nowhere", ["data_dir", "nowhere", "does not exist", "create_datasets_from_start.sh glue"]),
        ("init '' nowhere.txt", ["vocab_file", "nowhere.txt"]),
        ("init '' '' nowhere.json", ["config_file", "nowhere.json"]),
        ("init '' '' '' '' imdb", ["task_name", "imdb", "mrpc"]),
        ("init '' '' '' '' '' 1 16 3", ["batch_size", "16", "3"]),
        ("init '' '' '' '' '' 1 '' '' '' '' '' '' '' '' test", ["mode", "test"]),
        ("init '' '' '' '' '' 9", ["9", "8"]),
    ],
)
def test_bad_arguments_start_nothing(checkout, arguments, words):
    assert_refused(checkout.run(f"bash scripts/run_glue.sh {arguments}"), checkout, *words)


@pytest.mark.parametrize("preset", presets("glue_config.sh"))
@pytest.mark.parametrize(("task", "folder"), [("", "glue/MRPC"), ("cb", "superglue/CB")])
def test_a_preset_fits_the_script(checkout, preset, task, folder):
    (checkout.folder / "out" / "bert-large-uncased" / "phase2" / "1563").mkdir(parents=True)
    command = f"bash scripts/run_glue.sh $(source scripts/configs/glue_config.sh && {preset} {task})"
    result = checkout.run(command, RESULTS_DIR="out")
    assert result.returncode == 0, result.stderr
    run = glue_run(checkout)
    assert (run.data_dir, run.task_name) == (Path("data/download") / folder, task or "mrpc")
    assert run.output_dir == Path("out") / folder.split("/")[1]
    assert (run.amp, run.tf32) == ("_amp" in preset, "_tf32" in preset)
    assert (run.device == "cuda") == ("gpu" in preset)


def test_an_unknown_preset_starts_nothing_and_lists_the_known_ones(checkout):
    result = checkout.run("bash scripts/run_glue.sh $(source scripts/configs/glue_config.sh && dgxz900_amp)")
    assert_refused(result, checkout, "dgxz900_amp", *presets("glue_config.sh"))
