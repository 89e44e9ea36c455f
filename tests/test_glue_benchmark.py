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


def test_both_implementations_are_scored_over_the_seeds_and_their_results_are_in_one_file(model_folder, tmp_path):
    (tmp_path / "CoLA").mkdir()
    for name in ("train", "dev"):
        rows = [f"gj04\t{number % 2}\t\tThe {('cat', 'dog')[number % 2]} sleeps." for number in range(40)]
        (tmp_path / "CoLA" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    output = tmp_path / "result.json"
    done = run_program(
        *("benchmarks/glue_finetune.py", "--glue-dir", tmp_path, "--tasks", "cola", "--model-folder", model_folder),
        *("--output", output, "--device", "cpu", "--num-seeds", 2, "--max-train-samples", 32, "--epochs", 20),
        *("--batch-size", 8, "--max-seq-length", 16, "--learning-rate", 0.005),
        env={"OMP_WAIT_POLICY": "PASSIVE"},  # threads that spin starve each other where cores are shared
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    for implementation in ("this project", "transformers"):
        found = result[implementation]["cola"]
        assert [run["matthews_correlation"] for run in found["runs"]] == [1.0, 1.0]
        assert (found["summary"]["matthews_correlation_mean"], found["summary"]["matthews_correlation_std"]) == (1, 0)
        assert found["summary"]["training_sequences_per_second_mean"] > 0
        assert found["machine_info"]["torch"]
    assert "1.0000 +- 0.0000  1.0000 +- 0.0000" in done.stdout
    assert str(ROOT) not in output.read_text()
