"""The SQuAD benchmarks at toy size."""

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused, run_program

from benchmarks.squad import BY_LENGTH, FILE_ORDER, ordered_batches
from benchmarks.squad_finetune import summarize
from evaluation import prediction_batches
from run_config import PredictionConfig

FACTS = [
    ("Anna", "Paris", "a baker"),
    ("Boris", "Cairo", "an old pilot"),
    ("Carla", "Lima", "a judge"),
    ("Dmitri", "Oslo", "a painter of ships"),
]


def squad_document() -> dict:
    """Eight questions that a tiny model can learn by heart."""
    paragraphs = []
    for name, town, trade in FACTS:
        context = f"In the year 1900 {name} lived in {town}, and worked there as {trade} until the war."
        answers = {f"Where did {name} live?": town, f"What was {name}?": trade}
        questions = [
            {"id": question, "question": question, "answers": [{"text": text, "answer_start": context.index(text)}]}
            for question, text in answers.items()
        ]
        paragraphs.append({"context": context, "qas": questions})
    return {"version": "1.1", "data": [{"title": "People", "paragraphs": paragraphs}]}


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


def test_both_implementations_learn_the_questions_and_their_results_are_in_one_file(model_folder, tmp_path):
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps(squad_document()))
    output = tmp_path / "result.json"
    command = [
        *("benchmarks/squad_finetune.py", "--train-file", squad, "--predict-file", squad),
        *("--model-folder", model_folder, "--output", output, "--device", "cpu"),
        *("--max-seq-length", 80, "--epochs", 60, "--batch-size", 8, "--learning-rate", 0.005),
        *("--max-train-questions", 6, "--max-predict-questions", 6),
    ]
    done = run_program(*command, env=PASSIVE)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    for implementation in ("this project", "transformers"):
        found = result[implementation]["42"]
        assert (found["exact_match"], found["f1"], found["steps"]) == (100.0, 100.0, 45)
        assert found["train_seconds"] > 0
        assert found["machine_info"]["torch"]
    assert str(ROOT) not in output.read_text()
    refused = run_program(*command, "--only", "this project", "--learning-rate", 1, env=PASSIVE)
    assert_refused(refused, "result.json holds results with other settings")


def test_seeds_are_summarized_with_the_interval_of_the_difference():
    """Against Welch's interval, written out for two samples of three with the same spread (4 degrees of freedom)."""
    figures = {"train_seconds": 1.0, "inference_sequences_per_second": 2.0}
    result = {
        name: {str(seed): {"exact_match": base + seed, "f1": base - seed, **figures} for seed in range(3)}
        for name, base in (("this project", 11.0), ("transformers", 10.0))
    }
    summary = summarize(result)
    assert summary["this project"]["exact_match"] == {"mean": 12.0, "std": 1.0}
    half = 2.7764451 * (2 / 3) ** 0.5
    assert summary["difference of exact_match"]["mean"] == 1
    assert summary["difference of exact_match"]["interval"] == pytest.approx([1 - half, 1 + half])


def test_steps_and_inference_are_compared_with_transformers_at_the_same_logits(tmp_path):
    output = tmp_path / "squad.json"
    sizes = ("--train-batch-size", 2, "--predict-batch-size", 2, "--max-seq-length", 96, "--rounds", 2, "--steps", 1)
    sizes += ("--predict-windows", 7)
    done = run_program(
        "benchmarks/squad.py", "--model", "tiny", *sizes, "--output", output, "--device", "cpu", env=PASSIVE
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["largest_difference_of_logits"] < 1e-5
    longest = {"padded to the longest", "padded to the longest, same settings"}
    in_both_orders = {f"{name}, {order}" for name in longest for order in ("in file order", "sorted by length")}
    for work in ("training", "inference", "latency"):
        others = {"padded to 96"} | (in_both_orders if work == "inference" else longest)
        assert set(result[work]) == {"this project", *others}
        medians = {name: figures["sequences_per_second"]["median"] for name, figures in result[work].items()}
        for name in others:
            ratio = result[work][name]["speedup"]["ratio_of_medians"]
            assert ratio == pytest.approx(medians["this project"] / medians[name])
        assert all(median > 0 for median in medians.values())
    tokens = result["tokens_per_real_token"]
    assert tokens["in file order"] > tokens["sorted by length"] >= 1


def test_the_throughput_is_of_the_same_windows_in_both_orders():
    length_F = np.random.default_rng(0).integers(20, 384, 71)
    in_file_order = ordered_batches(length_F, 8, FILE_ORDER)
    assert [list(batch) for batch in in_file_order] == [list(range(71))[k : k + 8] for k in range(0, 71, 8)]
    by_length = {tuple(batch) for batch in ordered_batches(length_F, 8, BY_LENGTH)}
    assert sorted(feature for batch in by_length for feature in batch) == list(range(71))
    predicted = prediction_batches(length_F, PredictionConfig(8, seed=0), rank=0, world_size=1)
    assert by_length == {tuple(batch) for batch in predicted}
