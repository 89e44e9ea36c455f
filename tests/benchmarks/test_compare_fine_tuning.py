"""The comparison of fine-tuning with transformers, at toy size."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NO_DROPOUT, ROOT, TINY, read_json
from hugging_face import save
from small_runs import run_here
from squad_documents import squad_document
from transformers import BertConfig, BertModel

import run_glue
import run_squad
from benchmarks import compare_fine_tuning
from benchmarks.common.transformers_training import order_grouped_by_length
from benchmarks.compare_fine_tuning import main, summary
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.utils.errors import UserError

OURS, THEIRS = "this project", "transformers"
GROUPED = "transformers, grouped by length"


def write_squad(folder):
    """Eight questions that a tiny model can learn by heart."""
    for split in ("train", "dev"):
        (folder / f"{split}-v1.1.json").write_text(
            json.dumps(squad_document(False) | {"split": split})
        )


def write_cola(folder):
    for name, count in (("train", 32), ("dev", 16)):
        rows = [
            f"gj04\t{number % 2}\t\tThe {('cat', 'dog')[number % 2]} sleeps."
            for number in range(count)
        ]
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")


def run_in_this_process(command, **_options):
    main = {"run_squad.py": run_squad.main, "run_glue.py": run_glue.main}[command[1].name]
    return run_here(command[2:], main)


@pytest.mark.parametrize(
    ("task", "write", "flags", "perfect"),
    [
        (
            "squad",
            write_squad,
            ("--max-seq-length", 80, "--epochs", 60),
            {"exact_match": 100.0, "f1": 100.0},
        ),
        (
            "cola",
            write_cola,
            ("--max-seq-length", 16, "--epochs", 20),
            {"matthews_correlation": 1.0},
        ),
        (
            "squad-embedding",
            write_squad,
            ("--max-seq-length", 80, "--epochs", 30),
            {"ndcg@10": 1.0, "recall@1": 1.0},
        ),
    ],
)
def test_both_learn_the_task_and_the_same_command_continues(
    tmp_path, monkeypatch, capfd, task, write, flags, perfect
):
    if task.endswith("embedding"):
        pytest.importorskip("sentence_transformers")
    # Each process imports transformers again, which takes longer than these runs.
    call_here = lambda make, method, *arguments, **_: getattr(make(*arguments), method)()  # noqa: E731
    monkeypatch.setattr(compare_fine_tuning, "call_in_worker", call_here)
    monkeypatch.setattr(compare_fine_tuning, "subprocess", SimpleNamespace(run=run_in_this_process))
    write(tmp_path)
    config = BertConfig(**{**TINY, **NO_DROPOUT, "max_position_embeddings": 96})
    model_folder = save(BertModel(config), tmp_path / "model")
    (model_folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'
    )
    output = tmp_path / "result.json"
    command = (
        *(
            "--task-name",
            task,
            "--data-dir",
            tmp_path,
            "--output",
            output,
            "--model-folder",
            model_folder,
        ),
        *("--device", "cpu", "--batch-size", 8, "--learning-rate", 0.005, "--num-seeds", 1, *flags),
    )
    everybody = [OURS, THEIRS, GROUPED] if task == "cola" else [OURS, THEIRS]
    monkeypatch.setattr(compare_fine_tuning, "CONTESTANTS", everybody)
    main([*map(str, command)])
    runs = read_json(output)["runs"]
    assert [run["contestant"] for run in runs] == everybody
    main([*map(str, command)])
    assert read_json(output)["runs"] == runs  # not repeated
    for run in runs:
        assert {score: run[score] for score in perfect} == perfect
        assert (
            all(value > 0 for name, value in run.items() if name.endswith("_second"))
            and run["machine_info"]["torch"]
        )
    assert str(ROOT) not in output.read_text() and "torchao" not in "".join(capfd.readouterr())
    with pytest.raises(UserError, match="holds results with other settings"):
        main([*map(str, command), "--learning-rate", "1"])
    settings = read_json(output)["settings"]
    assert settings["model"] == "model"
    with (model_folder / "model.safetensors").open("r+b") as file:  # of equal name, but others
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    with pytest.raises(UserError, match="holds results with other settings"):
        main([*map(str, command)])
    settings["model_weights"] = ModelFolder(model_folder).weights_digest
    output.write_text(json.dumps({"settings": settings, "runs": runs}))
    next(tmp_path.glob("dev*")).open("a").write("\n")
    with pytest.raises(UserError, match="holds results with other settings"):
        main([*map(str, command)])


def test_seeds_are_summarized_with_the_interval_of_the_paired_difference():
    """Against Student's interval, written out for three differences of 0, 1 and 2 (2 degrees of
    freedom).
    """
    rate = compare_fine_tuning.RATE
    values = {OURS: (11.0, 12.0, 13.0), THEIRS: (11.0, 11.0, 11.0)}
    rates = {OURS: (2.0, 4.0, 3.0), THEIRS: (1.0, 1.0, 2.0)}
    runs = [
        {"contestant": name, "seed": seed, "f1": value, rate: rates[name][seed]}
        for name, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    half = 4.3026527 / 3**0.5
    interval = f"{OURS} +1 (95% interval {1 - half:+.2g} to {1 + half:+.2g})"
    assert summary(runs, ("f1",)) == [
        f"{OURS}: {rate} 3.0",
        "  f1 12 +- 1",
        f"{THEIRS}: {rate} 1.0; {OURS} / it: 2.00 (1.75-3.00)",  # of the pairs 2, 4 and 1.5
        f"  f1 11 +- 0; {interval}",
    ]


def test_batches_grouped_by_length_have_every_sample_once_and_as_little_filler_as_in_a_large_set():
    lengths = np.random.default_rng(0).integers(10, 200, 640)
    drawn = order_grouped_by_length(lengths, batch_size=16, num_drawn=1280, seed=0)
    for epoch in drawn.reshape(2, 640):
        assert sorted(epoch) == list(range(640))
    batches = lengths[drawn].reshape(-1, 16)
    padded = batches.max(1).sum() * 16
    assert padded < 1.03 * batches.sum()  # 1.08 in the sampler's groups of so small a set
