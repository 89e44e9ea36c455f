"""The GLUE benchmark at toy size."""

import json
import shutil

import pytest
from conftest import ROOT, TINY, VOCAB_FILE, run_program


@pytest.fixture
def model_folder(tmp_path):
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**TINY)).save_pretrained(tmp_path / "model")
    shutil.copy(VOCAB_FILE, tmp_path / "model" / "vocab.txt")
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return tmp_path / "model"


def test_both_implementations_are_scored_and_the_same_command_continues_with_more_seeds(model_folder, tmp_path):
    (tmp_path / "CoLA").mkdir()
    for name in ("train", "dev"):
        rows = [f"gj04\t{number % 2}\t\tThe {('cat', 'dog')[number % 2]} sleeps." for number in range(40)]
        (tmp_path / "CoLA" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    output = tmp_path / "result.json"
    command = (
        *("benchmarks/glue_finetune.py", "--glue-dir", tmp_path, "--tasks", "cola", "--model-folder", model_folder),
        *("--output", output, "--device", "cpu", "--max-train-samples", 32, "--epochs", 20, "--batch-size", 8),
        *("--max-seq-length", 16, "--learning-rate", 0.005, "--num-seeds"),
    )
    threads = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin starve each other where cores are shared
    first = run_program(*command, 1, env=threads)
    assert first.returncode == 0, first.stderr
    before = json.loads(output.read_text())
    done = run_program(*command, 2, env=threads)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    for implementation in ("this project", "transformers"):
        runs = result[implementation]["cola"]
        assert runs["42"] == before[implementation]["cola"]["42"]  # not repeated
        assert [runs[seed]["matthews_correlation"] for seed in ("42", "43")] == [1.0, 1.0]
        assert all(run["training_sequences_per_second"] > 0 and run["machine_info"]["torch"] for run in runs.values())
    assert "1.0000 +- 0.0000  1.0000 +- 0.0000" in done.stdout
    assert result["summary"]["cola"]["difference of matthews_correlation"] == {"mean": 0, "interval": [0, 0]}
    assert str(ROOT) not in output.read_text()
