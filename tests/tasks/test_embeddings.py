"""Sentence embeddings: losses against loops in float64, the same result however a batch is divided,
exact resuming, and sentence-transformers' folders in both directions.
"""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    NO_DROPOUT,
    TINY,
    VOCAB_FILE,
    assert_refused,
    fine_tuning_words,
    read_json,
    read_json_lines,
    write_json_lines,
)
from processes import exit_codes, fine_tune_on_ports, free_port, start_several
from rank_runs import run_distributed
from safetensors.torch import load_file
from small_runs import evaluations, run_here
from tokenizers import Tokenizer

import inference
import run_embeddings
from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.checkpoint.sentence_folders import PROMPTS_FILE, EmbeddingSettings
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.model.token_stream import BatchCounts
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.progress import printed_once

WORDS = [
    "sea",
    "ship",
    "boat",
    "captain",
    "river",
    "bank",
    "money",
    "clerk",
    "garden",
    "rose",
    "wind",
    "rain",
    "star",
]


def write_pairs(path: Path, count: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        anchor = random.choice(WORDS, random.integers(2, 9)).tolist()
        rows.append(
            {
                "q": " ".join(anchor),
                "p": " ".join(reversed(anchor)) + " indeed",
                "s": float(random.random()),
            }
        )
        rows[-1] |= {"n": " ".join(random.choice(WORDS, 3)), "stars": 4.5}
    write_json_lines(path, rows)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text(json.dumps({**TINY, **NO_DROPOUT}))
    (folder / "dropout.json").write_text(json.dumps({**TINY, "hidden_dropout_prob": 0.1}))
    write_pairs(folder / "train.jsonl", 32, 0)
    write_pairs(folder / "dev.jsonl", 12, 1)
    rows = list(map(json.loads, (folder / "train.jsonl").read_text().splitlines()))
    chain = [
        {"q": row["q"], "p": following["q"], "n": rows[number % 5]["q"]}
        for number, (row, following) in enumerate(itertools.pairwise(rows))
    ]
    write_json_lines(folder / "chain.jsonl", chain)
    return folder


def words(files: Path, output: Path, *flags) -> list[str]:
    shared = (
        "--text-column",
        "q",
        "--pair-column",
        "p",
        "--max-seq-length",
        16,
    )
    shared += ("--learning-rate", 0.001) if "--do-train" in flags else ()
    return fine_tuning_words(files / "config.json", output, *shared, *flags)


def train(files: Path, output: Path, *flags, steps: int = 3) -> dict[str, torch.Tensor]:
    output.mkdir(exist_ok=True)
    assert (
        run_embeddings.main(
            words(files, output, "--do-train", "--train-file", files / "train.jsonl", *flags)
        )
        == 0
    )
    path = output / "custom" / "embedding" / str(steps) / "model.safetensors"
    return load_file(path) if path.is_file() else {}


MARGIN = ("--negative-columns", "n", "--embedding-loss", "margin-mse")
# A large epsilon amplifies the rounding of tiny gradients less.
SHARED = ("--max-steps", 3, "--epochs", 3, "--epsilon", 1e-5)


def test_micro_batches_and_processes_change_nothing(files, tmp_path):
    kinds = {
        "triplets": ("--negative-columns", "n", "--symmetric-loss"),
        "scores": ("--label-column", "s"),
        "margins": ("--label-column", "s", "stars", *MARGIN),
    }
    merged = ("--train-batch-size", 4, "--gradient-merge-steps")
    results = {}
    commands = []
    for kind, flags in kinds.items():  # one micro-batch, without cached gradients, and eight
        results[kind, "whole"] = train(
            files, tmp_path / f"{kind}-whole", *SHARED, *flags, "--train-batch-size", 16
        )
        eight = ("--train-batch-size", 2, "--gradient-merge-steps", 8)
        results[kind, "eight"] = train(files, tmp_path / f"{kind}-eight", *SHARED, *flags, *eight)
    # The starting weights are scored, so parameters are gathered before the first update.
    scored = ("--do-eval", "--eval-file", files / "dev.jsonl", "--eval-steps", 3, "--no-baseline")
    sharded = ("--data-parallel-shard-degree", 2, *scored)
    for name, more in (
        ("ddp", (*merged, 2)),
        ("fsdp2", (*merged, 2, *sharded)),
        ("single", ("--train-batch-size", 8)),
    ):
        (tmp_path / name).mkdir()
        more += ("--do-train", "--train-file", files / "train.jsonl")
        commands.append(
            (str(free_port()), words(files, tmp_path / name, *SHARED, *kinds["triplets"], *more))
        )
    commands.append(
        (str(free_port()), [*commands[-1][1], "--global-batch-size", "1", "--overwrite"])
    )
    function = partial(fine_tune_on_ports, run_embeddings.main)
    processes = start_several(commands, tmp_path / "log", function=function)
    codes = exit_codes(processes)
    logs = "".join((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    # The first rank that fails reports.
    assert codes == [2, 2] and "the global batch (1) is smaller" in logs, logs
    for name in ("ddp", "fsdp2", "single"):
        results["triplets", name] = load_file(
            tmp_path / name / "custom" / "embedding" / "3" / "model.safetensors"
        )
    for (kind, name), weights in results.items():
        for key, value in weights.items():
            torch.testing.assert_close(
                value, results[kind, "whole"][key], rtol=0, atol=1e-6, msg=f"{name}: {key}"
            )


def loss_and_gradients(
    distributed: DistributedContext, files: Path, batch_size: int, num_sizes: int | None, count: int
) -> list[float]:
    """Of a global batch of 16 triplets, in float64: the loss, and of each parameter the gradient
    times random numbers.
    """
    options = EmbeddingTaskOptions(
        max_seq_length=16,
        text_column="q",
        pair_column="p",
        negative_columns=["n"],
        symmetric_loss=True,
        train_file=files / "chain.jsonl",
    )
    task, dataset = EmbeddingTask.learning(options, BertTokenizer(VOCAB_FILE))
    torch.manual_seed(0)
    model = make_model("sentence_embedding", read_config(files / "config.json")).train().double()
    limits = replace(
        MicroBatchLimits.for_batch(batch_size, 48, 0, num_sizes), sequences=6 * batch_size
    )
    batch = make_step_batch(
        dataset, np.arange(16)[distributed.rank :: distributed.world_size], limits
    )
    micro_batches, counts = batch.filled_to(count), BatchCounts(16, 0, 0)
    assert len(micro_batches) == count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        bound = task.for_batch(
            micro_batches, model, Runtime(torch.device("cpu"), distributed=distributed), seed=0
        )
        total = sum(
            task.loss(bound.sums(model, micro_batch), counts) for micro_batch in micro_batches
        )
        total.backward()
    torch.manual_seed(1)
    products = [(p.grad * torch.rand_like(p)).sum().item() for p in model.parameters()]
    return distributed.all_reduce_sum([total.item(), *products])


def test_the_loss_and_its_gradients_are_the_same_however_a_batch_is_divided(files, tmp_path):
    """Up to rounding, which is larger in float32. With fixed sizes, as on GPUs and with --compile,
    the last micro-batch may be filler only.
    """
    expected = loss_and_gradients(DistributedContext(), files, 16, None, 1)
    for division in ((16, 4, 1), (4, None, 4), (4, 1, 5), (2, None, 8)):
        result = loss_and_gradients(DistributedContext(), files, *division)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
    for processes, *division in ((4, 2, 4, 3), (2, 8, None, 1)):
        result = run_distributed(
            loss_and_gradients, tmp_path / str(processes), files, *division, count=processes
        )
        np.testing.assert_allclose(result, [expected] * processes, rtol=1e-12, atol=1e-12)


def test_a_stopped_run_resumes_exactly_and_dropout_is_the_same_in_both_passes(
    files, tmp_path, monkeypatch
):
    embed, passes = EmbeddingTask.embed, {False: [], True: []}  # without a graph, and with one

    def recorded(*args: object) -> torch.Tensor:
        embeddings_NE = embed(*args)
        passes[embeddings_NE.requires_grad].append(embeddings_NE)
        return embeddings_NE

    monkeypatch.setattr(EmbeddingTask, "embed", recorded)
    flags = (
        *SHARED,
        "--train-batch-size",
        4,
        "--gradient-merge-steps",
        3,
        "--config-file",
        files / "dropout.json",
    )
    whole = train(files, tmp_path / "whole", *flags)
    assert len(passes[False]) == len(passes[True]) > 3
    assert all(map(torch.equal, passes[False], passes[True]))
    flags += ("--resume-from-checkpoint",)
    train(files, tmp_path / "parts", *flags, "--steps-this-run", 1)
    parts = train(files, tmp_path / "parts", *flags)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_training_learns_scores_and_keeps_a_folder_for_sentence_transformers(files, tmp_path):
    flags = (
        "--eval-file",
        files / "dev.jsonl",
        "--corpus-file",
        files / "train.jsonl",
        "--eval-steps",
        8,
    )
    flags += ("--train-batch-size", 16, "--max-steps", 16, "--epochs", 99)
    flags += ("--query-prompt", "find: ", "--pooling", "first")
    train(files, tmp_path, *flags, steps=16)
    results = tmp_path / "custom" / "embedding"
    scores = read_json(results / "scores.json")
    assert scores["recall@10"] > 0.8
    best = max(evaluations(results), key=lambda entry: entry["ndcg@10"])
    assert scores["ndcg@10"] == best["ndcg@10"]
    assert read_json(results / "16" / "tokenizer_config.json")["model_max_length"] == 16

    flags += ("--do-train", "--train-file", files / "train.jsonl")
    for changed, says in (
        (("--corpus-file", files / "dev.jsonl"), "other development data"),
        (("--pooling", "mean"), "pooling first (this run uses mean)"),
    ):
        other = words(files, tmp_path, *flags, *changed, "--resume-from-checkpoint")
        assert_refused(run_here(other, run_embeddings.main), says)
    further = files / "passages.jsonl"  # the same texts in a column of another name
    further.write_text((files / "train.jsonl").read_text().replace('"p":', '"passage":'))
    again = (
        "--eval-file",
        files / "dev.jsonl",
        "--corpus-file",
        further,
        "--corpus-column",
        "passage",
        "--init-checkpoint",
        results,
    )
    assert run_embeddings.main(words(files, tmp_path / "b", *again)) == 0
    (path,) = (tmp_path / "b").rglob("scores.json")
    assert read_json(path)["ndcg@10"] == pytest.approx(scores["ndcg@10"])

    texts = [json.loads(line)["q"] for line in (files / "dev.jsonl").read_text().splitlines()]
    shared = ["--init-checkpoint", str(results), "--device", "cpu", "--text-column", "q"]
    embed = ["--input", str(files / "dev.jsonl"), "--output", str(tmp_path / "out.npy"), "--embed"]
    assert inference.main([*shared, *embed, "--prompt-name", "query"]) == 0
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(results / "best"), device="cpu")
    assert model.max_seq_length == 16
    expected = model.encode(texts, prompt_name="query")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)


# What text-embeddings-inference reads and has no default for, as its source says.
SERVED_CONFIG = {
    "architectures": list,
    **dict.fromkeys(("model_type", "hidden_act"), str),
    **dict.fromkeys(("hidden_dropout_prob", "initializer_range", "layer_norm_eps"), float),
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), int),
    **dict.fromkeys(("num_attention_heads", "intermediate_size", "type_vocab_size"), int),
    **dict.fromkeys(("max_position_embeddings", "pad_token_id"), int),
}
SERVED_POOLING = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")


def test_text_embeddings_inference_finds_what_it_reads(files, tmp_path):
    train(files, tmp_path, "--max-steps", 1, "--query-prompt", "q: ", steps=1)
    folder = tmp_path / "custom" / "embedding" / "1"
    config = read_json(folder / "config.json")
    kinds = {name: type(config[name]) for name in SERVED_CONFIG}
    assert kinds == SERVED_CONFIG
    assert not config["architectures"][0].endswith("Classification")  # another kind of model
    pooling = read_json(folder / "1_Pooling" / "config.json")
    modes = {name: pooling[f"pooling_mode_{name}"] for name in SERVED_POOLING}
    assert modes == dict.fromkeys(SERVED_POOLING, False) | {"mean_tokens": True}
    length = read_json(folder / "sentence_bert_config.json")
    assert length["max_seq_length"] == 16
    prompts = read_json(folder / PROMPTS_FILE)["prompts"]
    assert prompts == {"query": "q: ", "document": ""}
    tensors = load_file(folder / "model.safetensors")
    names = {"embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.weight"}
    assert {f"bert.{name}" for name in names} <= tensors.keys()
    text = "The Caf\u00e9's whale, unaffable?"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    # Not above: the processes of a run import this file too.
    from transformers import BertTokenizerFast

    assert ids == BertTokenizerFast(str(folder / "vocab.txt")).encode(text)


def test_texts_are_lower_cased_and_cut_as_the_starting_folder_says(files, tmp_path):
    """Before a cased tokenizer; in training, scoring and inference, as in sentence-transformers."""
    torch.manual_seed(0)
    # A second that each process of the tests above would wait.
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**{**TINY, **NO_DROPOUT, "initializer_range": 0.3})).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model" / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for name, content in (
        EmbeddingSettings(normalize=True, do_lower_case=True).files(32, 40).items()
    ):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    rows = read_json_lines(files / "dev.jsonl")
    rows = [row | {name: row[name].upper() for name in "qp"} for row in rows]
    write_json_lines(tmp_path / "dev.jsonl", rows)
    flags = (
        "--init-checkpoint",
        tmp_path / "model",
        "--config-file",
        "none",
        "--vocab-file",
        "none",
    )
    flags += (
        "--label-column",
        "s",
        "--eval-file",
        tmp_path / "dev.jsonl",
        "--max-steps",
        1,
        "--learning-rate",
        0,
    )
    train(files, tmp_path / "out", *flags)
    (step,) = (tmp_path / "out").rglob("1")
    command = (
        "--init-checkpoint",
        step,
        "--device",
        "cpu",
        "--input",
        tmp_path / "dev.jsonl",
        "--embed",
    )
    for name in "qp":
        output = ("--output", tmp_path / f"{name}.npy", "--text-column", name)
        assert inference.main([str(word) for word in (*command, *output)]) == 0
    q, p = (np.load(tmp_path / f"{name}.npy") for name in "qp")
    score = read_json(step.parent / "scores.json")["pearson"]
    assert score == pytest.approx(
        np.corrcoef((q * p).sum(axis=1), [row["s"] for row in rows])[0, 1], abs=1e-5
    )
    model = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(tmp_path / "model"), device="cpu"
    )
    np.testing.assert_allclose(q, model.encode([row["q"] for row in rows]), atol=1e-5)
    # Training cut texts at 16 tokens, the starting folder does so at 40.
    text = " ".join(row["q"] for row in rows)
    write_json_lines(tmp_path / "dev.jsonl", [{"q": text}])
    output = ("--output", tmp_path / "long.npy", "--text-column", "q")
    assert inference.main([str(word) for word in (*command, *output)]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "long.npy"), model.encode([text]), atol=1e-5)


@pytest.mark.parametrize(("stored", "expected"), [(8, 16), (40, 40), (256, 64), (None, 16)])
def test_training_on_short_texts_keeps_the_length_of_the_starting_folder(
    files, tmp_path, stored, expected
):
    """At most the positions of the model, 64."""
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": stored}))
    options = EmbeddingTaskOptions(
        max_seq_length=16, text_column="q", pair_column="p", train_file=files / "train.jsonl"
    )
    task, _ = EmbeddingTask.learning(options, BertTokenizer(VOCAB_FILE), tmp_path)
    written = task.model_files(read_config(files / "config.json"))["sentence_bert_config.json"]
    assert json.loads(written)["max_seq_length"] == expected


def tuples_of(path: Path, rows: list[tuple], score: str | None, **prompts: str) -> EmbeddingTask:
    """A task on a file of `rows`: anchors, positives and, with `score`, their scores."""
    lines = [json.dumps(dict(zip("qps", row, strict=False))) for row in rows]
    path.write_text("\n".join(lines))
    columns = {"text_column": "q", "pair_column": "p"}
    if score is not None:
        columns["label_column"] = [score]
    options = EmbeddingTaskOptions(train_file=path, eval_file=path, **columns)
    return EmbeddingTask(options, settings=EmbeddingSettings(prompts=prompts))


def test_what_is_cut_is_said_as_a_share(tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    rows = [("a", "b c d e f g h i j", 1.0), ("c", "d", 0.0)]
    says = "25.0% of the texts are longer than 8 tokens, and 25.0% of all tokens are cut off"
    options = replace(tuples_of(path, rows, "s").options, max_seq_length=8)
    scored = EmbeddingTask(replace(options, train_file=None), 8)
    for opens in (partial(EmbeddingTask.learning, options), scored.prediction_sets):
        printed_once.clear()
        opens(BertTokenizer(VOCAB_FILE))
        assert f"note: {path}: {says}" in capsys.readouterr().out
    EmbeddingTask.learning(replace(options, max_seq_length=16), BertTokenizer(VOCAB_FILE))
    assert "cut off" not in capsys.readouterr().out


def test_scores_that_float32_does_not_tell_apart_have_an_order(tmp_path):
    rows = [("a", "b", 2**30), ("c", "d", 2**30 + 1)]
    options = tuples_of(tmp_path / "train.jsonl", rows, "s").options
    _, dataset = EmbeddingTask.learning(options, BertTokenizer(VOCAB_FILE))
    assert dataset.stream(np.arange(2))["scores"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("rows", "score", "why"),
    [
        ([("a", "b", 3), ("c", "d", 3)], "s", "all scores are 3"),
        ([("a", "b", 3)], "s", "all scores are 3"),
        ([("sea", "sea"), ("star", "star")], None, "a text and itself"),
        ([("a", "sea"), ("b", "sea")], None, None),
        ([("a", "sea"), ("b", "land")], None, None),
        ([("a", "b", 3), ("c", "d", 4)], "s", None),
    ],
)
def test_scores_that_no_model_can_change_are_not_defined(tmp_path, rows, score, why):
    task = tuples_of(tmp_path / "dev.jsonl", rows, score)
    (scored_set,) = task.prediction_sets(BertTokenizer(VOCAB_FILE))
    assert scored_set.dataset.num_examples == len(rows)
    vectors = np.random.default_rng(0).normal(size=(len(scored_set.dataset), 8))
    scores = scored_set.finish(vectors, None)
    if why is None:
        assert scored_set.undefined is None and np.isfinite([*scores.values()]).all()
    else:
        assert why in scored_set.undefined and np.isnan([*scores.values()]).all()


def test_a_line_is_not_to_find_itself_beside_a_prompt_either(tmp_path):
    rows = [("sea", "ship"), ("ship", "star"), ("star", "rose")]
    prompts = {"query": "find: ", "document": "text: "}
    task = tuples_of(tmp_path / "dev.jsonl", rows, None, **prompts)
    (scored_set,) = task.prediction_sets(BertTokenizer(VOCAB_FILE))
    # A text is nearest to itself, then to the next one, without ties.
    place = {"sea": 0, "ship": 1, "star": 1.9, "rose": 2.7}
    originals = [text.partition(": ")[2] for text in read_texts_of(task)]
    angles = [place[text] / 2 for text in originals]
    scores = scored_set.finish(np.array([[np.cos(angle), np.sin(angle)] for angle in angles]), None)
    assert scores["recall@1"] == 1


def read_texts_of(task: EmbeddingTask) -> list[str]:
    options = task.options
    return read_tuples(options.eval_file, options.columns, None, task.settings).texts


def test_evaluations_begin_with_the_starting_weights(files, tmp_path, capsys):
    train(files, tmp_path / "a", *SHARED)
    start = tmp_path / "a" / "custom" / "embedding" / "3"
    flags = ("--eval-file", files / "dev.jsonl", "--max-steps", 4, "--epochs", 99)
    log = ("--report-file", tmp_path / "log.json", "--init-checkpoint", start)
    train(files, tmp_path / "b", *flags, *log, "--eval-steps", 2, steps=4)
    lines = capsys.readouterr().out.splitlines()
    (last,) = [line for line in lines if line.startswith("best: ndcg@10 ")]
    before = float(last.rpartition("; before training ")[2])
    scored = ("--do-eval", "--eval-file", files / "dev.jsonl", "--init-checkpoint", start)
    assert run_embeddings.main(words(files, tmp_path / "c", *scored)) == 0
    (scores,) = (tmp_path / "c").rglob("scores.json")
    assert before == pytest.approx(read_json(scores)["ndcg@10"], abs=1e-5)
    steps = [entry["step"] for entry in evaluations(tmp_path / "b/custom/embedding")]
    assert 0 not in steps  # the best model is a trained one
