"""scripts/run_glue_suite.sh: tasks, starting models, what is repeated, and the table."""

import json
import re
from pathlib import Path

import pytest
from launch_scripts import Checkout, program_arguments

from bert_recipe.reporting import glue_table
from bert_recipe.utils.errors import UserError


@pytest.fixture
def checkout(checkout, tmp_path) -> Checkout:
    for name in ("glue/MNLI", "glue/RTE"):
        (tmp_path / "data/download" / name).mkdir()
    (tmp_path / "out/mnli/init/mnli/seed-42/9").mkdir(parents=True)
    (tmp_path / "out/mnli/init/mnli/seed-42/9/model_progress.json").touch()
    return checkout


def starts(checkout: Checkout) -> dict[str, str]:
    """The starting model of each task that was run since the last call."""
    calls = [
        program_arguments(call, "run_glue.py") for call in checkout.calls() if "--task-name" in call
    ]
    checkout.calls_file.unlink()
    return {
        call[call.index("--task-name") + 1]: call[call.index("--init-checkpoint") + 1]
        for call in calls
    }


# What bash's `wait -n` says, about once in 10,000 times, of processes that end while it looks for
# them.
MISSED_ENDS = (
    "wait() { [[ ${1-} != -n ]] || { builtin wait ${@:4}; finished=; return 127; }; "
    "builtin wait $@; }; export -f wait; "
)


def test_small_tasks_start_from_mnli_and_what_is_done_is_not_run_again(checkout):
    command = "bash scripts/run_glue_suite.sh init '' out 3 {} 2"
    mnli = "out/mnli/init/mnli/seed-42"
    done = checkout.run(command.format("true"))
    assert done.returncode == 0, done.stderr
    assert "qqp: left out, because" in done.stdout
    assert starts(checkout) == {"cola": "init", "mnli": "init", "mrpc": mnli, "rte": mnli}
    done = checkout.run(MISSED_ENDS + command.format("true"))
    assert done.stdout.count("done before") == 4 and starts(checkout) == {}, done.stderr
    (checkout.folder / "data/download/glue/RTE/train.tsv").write_text("changed")
    (checkout.folder / mnli / "model.safetensors").write_text("changed")
    assert checkout.run(command.format("true")).returncode == 0
    # Each program knows whether the content is the same.
    assert starts(checkout) == {"mrpc": mnli, "rte": mnli}
    (checkout.folder / "init/model.safetensors").write_text("changed")
    assert checkout.run(command.format("true")).returncode == 0
    assert starts(checkout).keys() == {"cola", "mnli"}
    assert checkout.run(command.format("false")).returncode == 0
    assert starts(checkout) == {"mrpc": "init", "rte": "init"}
    (checkout.folder / "out/cola.done").unlink()
    done = checkout.run(MISSED_ENDS + command.format("false"), FAKE_CODE_OF="cola")
    assert done.returncode == 2 and "error: failed: cola: see the logs in out" in done.stderr
    done = checkout.run("bash scripts/run_glue_suite.sh data '' out")  # another model
    assert done.returncode == 2 and re.search(
        "out has the results of .*/init: give another folder", done.stderr
    )
    done = checkout.run("bash scripts/run_glue_suite.sh init data out")
    assert done.returncode == 2 and "data has none of MNLI" in done.stderr


def test_the_table_has_medians_and_says_what_was_chained(tmp_path, monkeypatch):
    def save(task: str, start: str, *scores: dict) -> None:
        for seed, values in enumerate(scores):
            path = (
                tmp_path
                / task
                / "model"
                / task
                / (f"seed-{seed}" if len(scores) > 1 else "")
                / "scores.json"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        command = (
            f"run_glue.py --init-checkpoint {start} --num-seeds 1 --seed=0 "
            f"--num_seeds {len(scores)}"
        )
        Path(tmp_path / f"{task}.done").write_text(command)

    monkeypatch.setattr("sys.argv", ["glue_table", str(tmp_path)])
    with pytest.raises(UserError, match="has no scores"):
        glue_table.main()
    save(
        "rte",
        "out/mnli/model/mnli/seed-42",
        {"accuracy": 0.7},
        {"accuracy": 0.8},
        {"accuracy": 0.72},
    )
    save("mnli", "models/mnli", {"matched_accuracy": 0.84, "mismatched_accuracy": 0.86})
    (tmp_path / "rte/model/rte/seed-3").mkdir()  # of an earlier command
    (tmp_path / "rte/model/rte/seed-3/scores.json").write_text('{"accuracy": 0.1}')
    lines = glue_table.markdown(glue_table.finished_tasks(tmp_path)).splitlines()
    assert lines[1] == "Started from the model fine-tuned on MNLI: RTE."
    cells = [re.split(r" +\| *|\| +", lines[row])[1:-1] for row in (3, 5)]
    assert cells[0] == ["MNLI (matched accuracy, mismatched accuracy)", "RTE (accuracy)", "mean"]
    assert cells[1] == ["85.0 (1)", "72.0 ± 5.3 (3)", "**78.5** (2 of 8 tasks)"]
    other = tmp_path / "rte/other/rte/seed-0/scores.json"
    other.parent.mkdir(parents=True)
    other.write_text('{"accuracy": 0.1}')
    with pytest.raises(UserError, match="rte has the scores of model/rte, other/rte: keep those"):
        glue_table.main()
    other.unlink()
    (tmp_path / "mnli.done").unlink()  # a task that is not finished is left out
    glue_table.main()
    table = (tmp_path / "glue.md").read_text()
    assert "**72.0** (1 of 8 tasks)" in table and "ModernBERT" in table
