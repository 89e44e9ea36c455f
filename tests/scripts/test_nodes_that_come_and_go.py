"""NNODES=MIN:MAX: two launch scripts on this machine are the nodes. `tests/release.py --nodes`
loses each of them, killed or stopped.
"""

import pytest
from elastic_nodes import ElasticRun, assert_losses_as_in, command_alone, kill, lose_and_restart
from small_runs import train


@pytest.mark.release
def test_a_killed_node_comes_back(inputs, tmp_path):
    run = ElasticRun(tmp_path / "run", inputs)
    assert lose_and_restart(run, "second", kill) == [0, 0]
    printed = (run.folder / "first").read_text()
    assert "pre-training on 1 x cpu" in printed and "Traceback" not in printed, printed
    train(command_alone(inputs, tmp_path))
    assert_losses_as_in(tmp_path, run)
