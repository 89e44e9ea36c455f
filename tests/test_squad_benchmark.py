"""The side-by-side fine-tuning in benchmarks/, in small."""

import json
import shutil
from argparse import Namespace

import numpy as np
import pytest
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused, run_program
from test_run_squad import squad_document

from benchmarks.squad import BY_LENGTH, FILE_ORDER, prediction_batches
from run_squad import prediction_batches as batches_of_run_squad
from utils.distributed import Processes


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
    sizes += ("--predict-windows", 7)
    done = run_program(
        "benchmarks/squad.py", "--model", "tiny", *sizes, "--output", output, "--device", "cpu", env=PASSIVE
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["largest_difference_of_logits"] < 1e-5
    longest = {"padded to the longest", "padded to the longest, our settings"}
    in_both_orders = {f"{peer}, {order}" for peer in longest for order in ("in file order", "sorted by length")}
    for what in ("training", "inference", "latency"):
        peers = {"padded to 96"} | (in_both_orders if what == "inference" else longest)
        assert set(result[what]) == {"ours", *peers}
        medians = {side: figures["sequences_per_second"]["median"] for side, figures in result[what].items()}
        for peer in peers:
            ratio = result[what][peer]["ours_is_faster_by"]["ratio_of_medians"]
            assert ratio == pytest.approx(medians["ours"] / medians[peer])
        assert all(figures["sequences_per_second"]["median"] > 0 for figures in result[what].values())
    padding = result["tokens_with_padding_to_the_longest"]
    assert padding["in file order"] > padding["sorted by length"] >= 1


def test_the_throughput_is_of_the_same_windows_in_both_orders():
    length_F = np.random.default_rng(0).integers(20, 384, 71)
    in_file_order = prediction_batches(length_F, 8, FILE_ORDER)
    assert [list(batch) for batch in in_file_order] == [list(range(71))[k : k + 8] for k in range(0, 71, 8)]
    by_length = {tuple(batch) for batch in prediction_batches(length_F, 8, BY_LENGTH)}
    assert sorted(feature for batch in by_length for feature in batch) == list(range(71))
    args = Namespace(predict_batch_size=8, seed=0, benchmark=False)
    predicted = batches_of_run_squad(Namespace(lengths=length_F), args, Namespace(processes=Processes()))
    assert by_length == {tuple(batch) for batch in predicted}
