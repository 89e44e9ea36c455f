"""NNODES=MIN:MAX: two launch scripts on this machine are the nodes. `tests/release.py --nodes`
kills and stops each of them, and starts it again.
"""

import pytest
from elastic_nodes import STEPS, ElasticRun, kill
from processes import PATIENCE, wait_until
from small_runs import losses, train

# What the script is given, or the script gives to the program.
FLAGS = ("--max-steps", STEPS, "--log-freq", 1, "--seed", 1, "--learning-rate", 1e-3)


def test_a_killed_node_comes_back_and_a_bad_flag_ends_without_a_restart(inputs, tmp_path):
    run = ElasticRun(tmp_path / "run", inputs)
    for step in (3, 6, 9):
        run.close_gate(step)
    first, second = run.start("first"), run.start("second")
    wait_until(lambda: run.waiting_at(3) == 2)
    kill(second)
    run.open_gate(3)
    wait_until(lambda: run.waiting_at(6) == 1)
    second = run.start("second")
    mistaken = run.start("mistaken", "--no-such-flag")
    alone = inputs.command(tmp_path, "--global-batch-size", 16, *FLAGS, dropout=False)
    train(alone)
    wait_until(lambda: run.waiting_at(9) == 2)  # the signal of the other's torchrun opened gate 6
    run.open_gate(9)
    assert [node.wait(PATIENCE) for node in (first, second, mistaken)] == [0, 0, 2]
    assert (run.folder / "mistaken").read_text().count("error: ") == 1
    printed = (run.folder / "first").read_text()
    assert "pre-training on 1 x cpu" in printed and "Traceback" not in printed, printed
    expected = losses(tmp_path)
    assert sorted(run.losses()) == sorted(expected) == list(range(1, STEPS + 1))
    for step, found in run.losses().items():
        assert list(found) == pytest.approx([expected[step]] * len(found), rel=1e-6)
