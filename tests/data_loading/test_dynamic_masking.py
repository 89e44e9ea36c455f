"""Masks drawn at load time: their statistics, the order of samples, resuming, and flags."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from book_text import write_text
from conftest import CLS, MASK, SEP, TINY, VOCAB_FILE, assert_refused, read_json
from small_runs import losses, reported, resuming, run_here, steps_folder, weights

import create_pretraining_data
from bert_recipe.checkpoint.record import read_record
from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import StepLoader, batches_in_order
from bert_recipe.data_loading.masking import Masking
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset, open_dataset
from bert_recipe.data_loading.sample_order import sample_seeds
from bert_recipe.model.encoders.registry import config_from_dict
from bert_recipe.tokenization.tokenizer import BertTokenizer
from data import prepare

VOCAB_SIZE = TINY["vocab_size"]
LENGTH, PREDICTIONS = 64, 12


def make_shards(folder: Path, *flags, length: int = LENGTH) -> Path:
    """Shards without masks of two texts."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(2):
        write_text(texts / f"{number}.txt", documents=60, seed=number)
    command = (
        "--input-dir",
        texts,
        "--output-dir",
        folder / "shards",
        "--vocab-file",
        VOCAB_FILE,
        "--num-workers",
        1,
    )
    command = (*command, "--max-seq-length", length, "--dynamic-masking", *flags)
    create_pretraining_data.main([*map(str, command)])
    return folder / "shards"


@pytest.fixture(scope="module", params=["--nsp", "--no-nsp"])
def shards(request, tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("dynamic"), request.param)


def open_shards(
    folder: Path, rate=0.15, predictions=PREDICTIONS, whole_word=False
) -> PretrainingDataset:
    dataset = PretrainingDataset(folder, VOCAB_SIZE)
    dataset.draw_masks(Masking(BertTokenizer(VOCAB_FILE), rate, predictions, whole_word))
    return dataset


def unmasked(dataset: PretrainingDataset) -> dict[str, np.ndarray]:
    return {
        key: values.astype(int) for key, values in dataset.rows(np.arange(len(dataset))).items()
    }


def streams(dataset: PretrainingDataset, passes: int):
    """The stream of all samples, with the masks of several epochs."""
    order = np.arange(len(dataset))
    for number in range(passes):
        yield dataset.read(order, sample_seeds(order + number * len(dataset), seed=7)).stream(order)


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_the_share_of_tokens_is_masked_80_10_10_and_the_rest_is_the_text(shards, probability):
    dataset = open_shards(shards, probability, predictions=30)
    stored = unmasked(dataset)
    counts = np.zeros(4)
    other = []
    text = stored["input_ids"][stored["input_mask"] > 0]
    lengths = stored["input_mask"].sum(axis=1)
    for stream in streams(dataset, 10):
        positions, labels = stream["mlm_positions"], stream["mlm_labels"]
        assert (labels == text[positions]).all() and not np.isin(labels, [CLS, SEP]).any()
        changed = np.flatnonzero(stream["input_ids"] != text)
        assert np.isin(changed, positions).all()
        sample = np.searchsorted(stream["cu_seqlens"], positions, side="right") - 1
        per_sample = np.bincount(sample, minlength=len(dataset))
        text_tokens = lengths - 2 - dataset.has_next_sentence
        assert (
            per_sample.tolist()
            == np.minimum(np.clip(np.rint(probability * lengths), 1, 30), text_tokens).tolist()
        )
        now = stream["input_ids"][positions]
        is_other = (now != MASK) & (now != labels)
        counts += [len(now), (now == MASK).sum(), (now == labels).sum(), is_other.sum()]
        other += now[is_other].tolist()
    total, *shares = counts
    tolerance = 4 * np.sqrt(0.2 / total)
    assert shares[0] / total == pytest.approx(0.8, abs=tolerance)
    assert shares[1] / total == pytest.approx(0.1, abs=tolerance)
    assert np.mean(other) == pytest.approx(VOCAB_SIZE / 2, rel=0.1)
    assert np.bincount(np.array(other) * 10 // VOCAB_SIZE, minlength=10).min() > 0.06 * len(other)


def test_all_text_positions_are_masked_equally_often_and_independently(shards):
    dataset = open_shards(shards)
    full = np.flatnonzero(unmasked(dataset)["input_mask"].all(axis=1))[:1]
    times = 4000
    samples = dataset.read(np.repeat(full, times), sample_seeds(np.arange(times), seed=3))
    stream = samples.stream(np.arange(times))
    is_masked = np.zeros((times, LENGTH), bool)
    is_masked.ravel()[stream["mlm_positions"]] = True
    is_text = ~np.isin(unmasked(dataset)["input_ids"][full[0]], [CLS, SEP])
    share = 10 / is_text.sum()  # round(.15 * 64)
    spread = np.sqrt(share * (1 - share) / times)
    assert np.abs(is_masked.mean(axis=0) - share * is_text).max() < 4.5 * spread
    # Pairs of neighbours, and the masks of consecutive positions in the order.
    both = (is_masked[:, 1:] & is_masked[:, :-1])[:, is_text[1:] & is_text[:-1]].mean()
    assert both == pytest.approx(share * 9 / (is_text.sum() - 1), rel=0.05)
    assert (is_masked[1:] & is_masked[:-1])[:, is_text].mean() == pytest.approx(share**2, rel=0.05)


def test_whole_words_are_masked_whole(shards):
    dataset = open_shards(shards, whole_word=True)
    stored = unmasked(dataset)
    pieces = np.array([token.startswith("##") for token in BertTokenizer(VOCAB_FILE).tokens])
    is_special = np.isin(stored["input_ids"], [CLS, SEP])
    continues = pieces[stored["input_ids"]]
    continues[:, 1:] &= ~is_special[:, :-1]  # a segment begins with a word of its own
    is_real = stored["input_mask"] > 0
    continues, shares = continues[is_real], []
    for stream in streams(dataset, 3):
        is_masked = np.zeros(is_real.sum(), bool)
        is_masked[stream["mlm_positions"]] = True
        inside = np.flatnonzero(continues)
        assert (is_masked[inside] == is_masked[inside - 1]).all()
        assert is_masked[inside].sum() > 20
        shares.append(is_masked.mean())
    assert np.mean(shares) == pytest.approx(0.15, rel=0.05)


def global_batches(
    shards: Path, count: int, first_position: int = 0, world_size: int = 1, seed: int = 5, workers=0
):
    """Of each global batch, its sequences with their masks, from all ranks; the rate falls from 0.4
    to 0.1.
    """
    config = LoaderConfig(4, 12, LENGTH, 26, num_workers=workers)
    loaders = [
        iter(
            StepLoader(
                open_shards(shards, "0.4:0.1", 26),
                config,
                seed,
                first_position,
                rank,
                world_size,
                updates=8,
            )
        )
        for rank in range(world_size)
    ]
    return [
        sorted(itertools.chain(*(sequences(next(loader).micro_batches) for loader in loaders)))
        for _ in range(count)
    ]


def sequences(micro_batches) -> list[tuple]:
    parts = []
    for batch in micro_batches:
        labels = np.full(len(batch["input_ids"]), -1)
        labels[batch["mlm_positions"]] = batch["mlm_labels"]
        bounds = batch["cu_seqlens"][1:-1].tolist()
        for ids, label in zip(
            np.split(batch["input_ids"].numpy(), bounds), np.split(labels, bounds), strict=True
        ):
            parts.append((*ids.tolist(), *label.tolist()))
    return parts


def test_masks_follow_the_order_at_any_number_of_ranks_and_workers_and_after_resuming(shards):
    batches = global_batches(shards, 8)
    for world_size, workers in ((2, 0), (3, 2), (16, 1)):
        assert global_batches(shards, 8, world_size=world_size, workers=workers) == batches
    assert global_batches(shards, 5, first_position=36, world_size=2) == batches[3:]
    assert global_batches(shards, 8, seed=6) != batches
    for number, batch in enumerate(batches):
        halves = [np.split(np.array(sequence), 2) for sequence in batch]  # ids, labels
        expected = sum(round((0.4 - 0.3 * number / 7) * len(ids)) for ids, _ in halves)
        # Rounding.
        assert sum((labels >= 0).sum() for _, labels in halves) == pytest.approx(expected, abs=3)


def test_every_epoch_has_other_masks(shards):
    first, second = streams(open_shards(shards), 2)
    assert (first["cu_seqlens"] == second["cu_seqlens"]).all()
    assert np.isin(first["mlm_positions"], second["mlm_positions"]).mean() < 0.3


def test_evaluation_has_the_same_masks_every_time_and_at_any_number_of_ranks(shards):
    def evaluated(world_size: int) -> list[tuple]:
        dataset = open_shards(shards)
        limits = MicroBatchLimits.for_batch(4, LENGTH, PREDICTIONS)
        parts = [np.arange(rank, len(dataset), world_size) for rank in range(world_size)]
        batches = [batch for part in parts for batch in batches_in_order(dataset, part, limits)]
        return sorted(itertools.chain(*(sequences(batch.micro_batches) for batch in batches)))

    assert evaluated(1) == evaluated(1) == evaluated(3)


def test_a_shard_without_masks_takes_a_fifth_and_is_verified(tmp_path):
    dynamic = make_shards(tmp_path / "dynamic", length=128)
    static = tmp_path / "static"
    flags = (
        "--input-dir",
        tmp_path / "dynamic/texts",
        "--output-dir",
        static,
        "--vocab-file",
        VOCAB_FILE,
    )
    create_pretraining_data.main(
        [*map(str, flags), "--max-seq-length", "128", "--num-workers", "1"]
    )
    sizes = [
        sum(path.stat().st_size for path in folder.glob("*.hdf5")) for folder in (dynamic, static)
    ]
    assert sizes[0] < 0.2 * sizes[1] and open_shards(dynamic).shards[0].is_contiguous
    verified = run_here(["verify", dynamic, "--vocab-file", VOCAB_FILE], prepare.main)
    assert "training draws the masks" in verified.stdout


def command(inputs, shards: Path, output: Path, *extra) -> list[str]:
    config = read_json(inputs.config) | {"vocab_size": VOCAB_SIZE}
    path = output.parent / "config.json"
    path.write_text(json.dumps(config))
    flags = (
        "--input-dir",
        shards,
        "--config-file",
        path,
        "--vocab-file",
        VOCAB_FILE,
        "--max-seq-length",
        LENGTH,
    )
    words = inputs.command(output, *flags, *extra)
    place = words.index("--max-predictions-per-seq")  # the fixture's, for shards with masks
    return words[:place] + words[place + 2 :]


def test_a_run_that_is_stopped_and_resumed_is_the_run_without_a_stop(inputs, shards, tmp_path):
    flags = (
        "--max-steps",
        6,
        "--log-freq",
        1,
        "--eval-dir",
        shards.parent / "shards/1.hdf5",
        "--whole-word-mask",
    )
    flags = (*flags, "--input-dir", shards / "0.hdf5", "--masked-lm-prob", "0.4:0.1")
    for output, parts in (
        ("whole", [()]),
        ("parts", [("--steps-this-run", 2), resuming(tmp_path / "parts")]),
    ):
        for extra in parts:
            result = run_here(command(inputs, shards, tmp_path / output, *flags, *extra))
            assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "parts")[6] == losses(tmp_path / "whole")[6]
    whole, parts = (weights(tmp_path / name, 6) for name in ("whole", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)
    rates = [
        entry["mask_rate"]
        for entry in reported(tmp_path / "parts/report.json").values()
        if "mask_rate" in entry
    ]
    assert rates == pytest.approx([0.4, 0.34, 0.28, 0.22, 0.16, 0.1])
    flags_then = read_record(steps_folder(tmp_path / "whole")).hyperparameters
    assert flags_then["--masked-lm-prob"] == "0.4:0.1"
    assert flags_then["--whole-word-mask"] is True
    resumed = (*flags, *resuming(tmp_path / "whole"), "--masked-lm-prob", 0.2)
    other = run_here(command(inputs, shards, tmp_path / "whole", *resumed))
    assert_refused(other, "--masked-lm-prob 0.4:0.1 (this run uses 0.2)")
    other = run_here(
        command(inputs, shards, tmp_path / "other", *flags, "--max-predictions-per-seq", 25)
    )
    assert_refused(
        other, "--max-predictions-per-seq 25 is too low", "0.4:0.1 of 64 tokens takes 26"
    )


def test_held_out_shards_have_the_same_rate_in_every_evaluation(inputs, shards):
    model = config_from_dict(read_json(inputs.config) | {"vocab_size": VOCAB_SIZE})
    loader = LoaderConfig(4, 4, LENGTH, None, masked_lm_prob=0.4)
    dataset = open_dataset(shards, BertTokenizer(VOCAB_FILE), model, loader, is_held_out=True)
    samples = dataset.read(np.arange(len(dataset)))
    # At least one token of a sample is masked; a half may be rounded up or down.
    difference = samples.num_labelled - np.maximum(1, 0.15 * samples.lengths)
    assert np.abs(difference).max() < 0.5 + 1e-6
