"""The side-by-side fine-tuning in benchmarks/, in small."""

import json
import shutil

import pytest
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused, run_program
from test_run_squad import squad_document


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from transformers import BertConfig, BertForQuestionAnswering

    folder = tmp_path_factory.mktemp("model")
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**{**TINY, **without_dropout, "max_position_embeddings": 96})
    BertForQuestionAnswering(config).save_pretrained(folder)
    shutil.copy(VOCAB_FILE, folder / "vocab.txt")
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin starve each other where cores are shared


def test_both_sides_learn_the_questions_and_the_halves_meet_in_one_file(model_folder, tmp_path):
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(squad_document(with_impossible=False)))
    result_file = tmp_path / "result.json"
    command = [
        *("benchmarks/squad_finetune.py", "--train-file", squad, "--predict-file", squad),
        *("--model-folder", model_folder, "--result-file", result_file, "--device", "cpu"),
        *("--max-seq-length", 80, "--epochs", 60, "--batch-size", 8, "--learning-rate", 0.005),
        *("--max-train-questions", 6, "--max-predict-questions", 6),
    ]
    for half in ("ours", "transformers"):
        done = run_program(*command, "--only", half, env=PASSIVE)
        assert done.returncode == 0, done.stderr
    result = json.loads(result_file.read_text())
    for half in ("ours", "transformers"):
        assert (result[half]["exact_match"], result[half]["f1"], result[half]["steps"]) == (100.0, 100.0, 45)
        assert result[half]["train_seconds"] > 0
        assert result[half]["surroundings"]["torch"]
    assert str(ROOT) not in result_file.read_text()
    refused = run_program(*command, "--only", "ours", "--seed", 7, env=PASSIVE)
    assert_refused(refused, "result.json holds results with other settings")


def test_steps_and_inference_are_measured_beside_transformers_with_the_same_logits(tmp_path):
    output = tmp_path / "squad.json"
    sizes = ("--train-batch-size", 2, "--predict-batch-size", 2, "--max-seq-length", 96, "--rounds", 2, "--steps", 1)
    done = run_program(
        "benchmarks/squad.py", "--model", "tiny", *sizes, "--output", output, "--device", "cpu", env=PASSIVE
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["largest_difference_of_logits"] < 1e-5
    for what in ("training", "inference", "latency"):
        peers = {"padded to the longest", "padded to 96", "padded to the longest, our settings"}
        assert set(result[what]) == {"ours", *peers}
        medians = {side: figures["sequences_per_second"]["median"] for side, figures in result[what].items()}
        for peer in peers:
            ratio = result[what][peer]["ours_is_faster_by"]["ratio_of_medians"]
            assert ratio == pytest.approx(medians["ours"] / medians[peer])
        assert all(figures["sequences_per_second"]["median"] > 0 for figures in result[what].values())
