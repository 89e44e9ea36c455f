"""The data set of pre-training: samples of HDF5 shards as token streams.

Legend: n samples, S sequence length, P most masked tokens of a sample; of a stream T tokens, N
sequences, M masked.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.hdf5_shards import KEYS, ContiguousShards, max_documents, open_shards
from bert_recipe.data_loading.masking import DEFAULT_RATE, Masking, max_masked_at
from bert_recipe.data_loading.packing import Label
from bert_recipe.data_loading.row_rules import check_agreement, check_rows, read_rows
from bert_recipe.data_loading.sample_order import sample_seeds
from bert_recipe.model.encoders.config import check_length
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import PeerError, UserError
from bert_recipe.utils.json_files import json_digest
from bert_recipe.utils.progress import print_line, progress_bar

if TYPE_CHECKING:
    from bert_recipe.model.encoders.config import ModelConfig

EVALUATION_SEED = 0


class PretrainingDataset:
    """The samples of all shards in a folder, sorted by shard name (see
    data_loading.loader.StreamDataset).

    vocab_size: the model's; an id outside it is an error that names the shard and the row. Raises
    UserError if there are no samples, or if shards do not match.
    """

    stream_labels = (
        Label("mlm_positions", "masked", filler=0),
        Label("mlm_labels", "masked"),
        Label("nsp_labels", "sequence"),
    )

    def __init__(self, folder: str | Path, vocab_size: int):
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.shards = [shard for shard in open_shards(folder) if len(shard)]
        if not self.shards:
            raise UserError(f"the shards in {folder} hold no sample: make them from more text")
        first = self.shards[0]
        check_agreement(self.shards)
        self.sequence_length = first.sequence_length
        self.max_labelled_per_sample = first.max_masked
        self.masking: Masking | None = None
        self.attributes = first.attributes
        is_packed = bool(first.attributes.get("pack_documents"))
        self.max_sequences_per_sample = max_documents(self.sequence_length) if is_packed else 1
        # The samples of a shard have the indices [first, end).
        sizes = [len(shard) for shard in self.shards]
        self.ends = np.cumsum(sizes)
        self.firsts = self.ends - sizes
        dtypes = {tuple(shard.layouts[key].dtype for key in KEYS) for shard in self.shards}
        have_same_dtypes = len(dtypes) == 1
        self.contiguous: ContiguousShards | None = None
        if have_same_dtypes and all(shard.is_contiguous for shard in self.shards):
            self.contiguous = ContiguousShards(self.shards)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def draw_masks(self, masking: Masking) -> None:
        """Sets the masks of shards that have none."""
        self.masking, self.max_labelled_per_sample = masking, masking.rule.max_masked

    @property
    def has_next_sentence(self) -> bool:
        return bool(self.attributes.get("next_sentence_prediction", True))

    def digest(self) -> str:
        """Identifies the data of a run: numbers of samples, sampled rows and attributes of the
        shards in order, not their names or storage. Stored checksums are not used: they may be
        stale if values were edited.
        """
        shards = []
        for shard in self.shards:
            stored = {
                k: v
                for k, v in shard.attributes.items()
                if not k.startswith(("compression", "checksum"))
            }
            shards.append([len(shard), shard.digest, stored])
        content = [self.sequence_length, self.shards[0].max_masked, shards]
        return "rows:" + json_digest(content)

    def check_shards(self, held_out: "PretrainingDataset | None") -> None:
        """Raises UserError for duplicate shards, also in `held_out`, and for sampled rows without a
        masked token (see `Shard.digest`).
        """
        shards = [("shard", shard, "remove one of them") for shard in self.shards]
        if held_out is not None:
            advice = "give another --eval-dir"
            shards += [("held-out shard", shard, advice) for shard in held_out.shards]
        path_of_digest: dict[str, Path] = {}
        for what, shard, advice in shards:
            first = path_of_digest.setdefault(shard.digest, shard.path)
            if first is not shard.path:
                raise UserError(f"{what} {shard.path} holds the same samples as {first}: {advice}")

    @property
    def bytes_in_memory(self) -> int:
        """Estimated memory of the compressed or chunked shards, when all are loaded."""
        per_sample = 4 * self.sequence_length + 3 * self.max_labelled_per_sample
        return sum(len(shard) * per_sample for shard in self.shards if not shard.is_contiguous)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of the samples `indices` [n] in all data sets."""
        numbers = np.searchsorted(self.ends, indices, side="right")
        rows = indices - self.firsts[numbers]
        if self.contiguous is not None:
            return self.contiguous.read(numbers, rows)
        shapes = {key: layout.shape[1:] for key, layout in self.shards[0].layouts.items()}
        values = {key: np.empty((len(rows), *shapes[key]), np.int64) for key in KEYS}
        for number in np.unique(numbers):
            in_shard = np.flatnonzero(numbers == number)
            for key in KEYS:
                values[key][in_shard] = self.shards[number].read(key, rows[in_shard])
        return values

    def read(
        self, indices: np.ndarray, seeds: np.ndarray | None = None, progress: float = 0.0
    ) -> "PretrainingSamples":
        seeds = sample_seeds(indices, EVALUATION_SEED) if seeds is None else seeds
        return PretrainingSamples(self, indices, seeds, progress)

    def check_rows(self, indices: np.ndarray) -> None:
        """Raises UserError, naming the shard and the row, if one of the samples is damaged."""
        numbers = np.searchsorted(self.ends, indices, side="right")
        for number, row in zip(numbers, indices - self.firsts[numbers], strict=True):
            rows = np.array([row])
            check_rows(
                self.shards[number], rows, read_rows(self.shards[number], rows), self.vocab_size
            )


class PretrainingSamples:
    def __init__(
        self, dataset: PretrainingDataset, indices: np.ndarray, seeds: np.ndarray, progress: float
    ):
        self.dataset = dataset
        self.indices = indices
        self.rows = dataset.rows(indices)
        documents_nS, ids_nS = self.rows["input_mask"], self.rows["input_ids"]
        self.mask_nS = documents_nS != 0
        self.metrics: dict[str, float] = {}
        if dataset.masking is not None:
            if not in_range(ids_nS, 0, dataset.vocab_size):
                dataset.check_rows(indices)
            # A repacked shard may have a type for its own ids only.
            id_type = np.promote_types(ids_nS.dtype, np.min_scalar_type(dataset.vocab_size - 1))
            ids_nS = self.rows["input_ids"] = ids_nS.astype(id_type, copy=False)
            masks = dataset.masking.draw(ids_nS, self.mask_nS, seeds, progress)
            self.rows["masked_lm_positions"], self.rows["masked_lm_ids"] = masks
            self.metrics["mask_rate"] = dataset.masking.rate(progress)
        self.lengths = np.count_nonzero(self.mask_nS, axis=1)
        self.num_sequences = np.ones(len(indices), np.int64)
        if dataset.max_sequences_per_sample > 1:
            self.num_sequences = documents_nS.max(axis=1, initial=1).astype(np.int64)
        if not in_range(documents_nS, 0, dataset.max_sequences_per_sample + 1):
            dataset.check_rows(indices)
        # Position 0 is [CLS], which is never masked, so 0 is padding.
        self.num_labelled = np.count_nonzero(self.rows["masked_lm_positions"], axis=1)

    def stream(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        values = {key: self.rows[key][rows] for key in KEYS}
        mask_NS = self.mask_nS[rows]
        lengths_N = self.lengths[rows]
        starts_N = np.cumsum(lengths_N) - lengths_N
        positions_NP = values["masked_lm_positions"].astype(np.int64)
        is_masked_NP = positions_NP > 0
        offsets_S = np.arange(self.dataset.sequence_length, dtype=np.int64)
        column_T = np.broadcast_to(offsets_S, mask_NS.shape)[mask_NS]
        stream = {
            "input_ids": values["input_ids"][mask_NS].astype(np.int64),
            "token_type_ids": values["segment_ids"][mask_NS].astype(np.int64),
            "position_ids": column_T,
            "cu_seqlens": np.append(0, np.cumsum(lengths_N)).astype(np.int32),
            "mlm_positions": (positions_NP + starts_N[:, None])[is_masked_NP],
            "mlm_labels": values["masked_lm_ids"][is_masked_NP].astype(np.int64),
            "nsp_labels": values["next_sentence_labels"].astype(np.int64),
        }
        is_valid = self._is_valid(stream, lengths_N, positions_NP)
        if self.dataset.max_sequences_per_sample > 1:
            document_T = values["input_mask"][mask_NS]
            begins_T = (column_T == 0) | (document_T != np.roll(document_T, 1))
            begins_N = np.flatnonzero(begins_T)
            lengths_N = np.diff(begins_N, append=len(column_T))
            stream["position_ids"] = np.arange(len(column_T)) - np.repeat(begins_N, lengths_N)
            stream["cu_seqlens"] = np.append(begins_N, len(column_T)).astype(np.int32)
            stream["nsp_labels"] = np.full(len(begins_N), -1)
            is_valid &= len(begins_N) == self.num_sequences[rows].sum()
        if not is_valid:
            self.dataset.check_rows(self.indices[rows])
        return stream

    def _is_valid(
        self, stream: dict[str, np.ndarray], lengths_N: np.ndarray, positions_NP: np.ndarray
    ) -> bool:
        """Fast check of a whole stream. Damaged data must stop the run."""
        last_T = stream["cu_seqlens"][1:] - 1
        return bool(
            (lengths_N > 0).all()
            and (stream["position_ids"][last_T] == lengths_N - 1).all()  # no hole in the mask
            and in_range(stream["input_ids"], 0, self.dataset.vocab_size)
            and in_range(stream["mlm_labels"], 0, self.dataset.vocab_size)
            and in_range(stream["token_type_ids"], 0, 2)
            and in_range(stream["nsp_labels"], -1, 2)
            and (positions_NP.min(axis=1, initial=0) >= 0).all()
            and (positions_NP.max(axis=1, initial=0) < lengths_N).all()
        )


def in_range(values: np.ndarray, low: int, limit: int) -> bool:
    return values.min(initial=low) >= low and values.max(initial=low) < limit


def check_data(
    dataset: PretrainingDataset,
    tokenizer: Tokenizer,
    bert_config: "ModelConfig",
    loader: LoaderConfig,
    length: int | None,
) -> None:
    """Raises UserError if shards, vocabulary, config and flags do not fit together."""
    for flag, wanted, stored in (
        ("--max-seq-length", length, dataset.sequence_length),
        ("--max-predictions-per-seq", loader.max_masked, dataset.max_labelled_per_sample),
    ):
        if wanted and stored and wanted != stored:
            raise UserError(
                f"{dataset.folder} was made with {flag} {stored}, and this run has {wanted}: give "
                f"{flag} {stored}, or shards of {wanted}"
            )
    what = f"the sequence length of the shards in {dataset.folder},"
    check_length(what, dataset.sequence_length, bert_config)
    made_with = dataset.attributes.get("vocab_sha256")
    if made_with is not None and made_with != tokenizer.vocab_sha256:
        raise UserError(
            f"the shards in {dataset.folder} were made with another vocabulary than "
            f"{tokenizer.vocab_file}: give --vocab-file the one that they were made with, or make "
            "them again"
        )


def open_dataset(
    folder: Path,
    tokenizer: Tokenizer,
    bert_config: "ModelConfig",
    loader: LoaderConfig,
    length: int | None = None,
    is_held_out: bool = False,
) -> PretrainingDataset:
    """Opens and checks the shards in `folder`, and sets how masks are drawn for shards without.
    Raises UserError for shards and flags that do not fit together.

    length: of their sequences, if it has to be this one.
    is_held_out: for evaluation, with masks at a fixed rate.
    """
    dataset = PretrainingDataset(folder, bert_config.vocab_size)
    check_data(dataset, tokenizer, bert_config, loader, length)
    if dataset.max_labelled_per_sample:
        if not is_held_out:
            check_without_masking(dataset, loader)
    else:
        dataset.draw_masks(choose_masking(dataset, tokenizer, loader, is_held_out))
    if dataset.bytes_in_memory > 2**30:
        print_line(
            f"note: the shards in {folder} are compressed or chunked: reading them takes about "
            f"{dataset.bytes_in_memory / 2**30:.1f} GiB of memory per process; python3 "
            f"data/prepare.py repack {shlex.quote(str(folder))} makes contiguous ones of them, "
            "which take none"
        )
    return dataset


def check_without_masking(dataset: PretrainingDataset, loader: LoaderConfig) -> None:
    """Raises UserError for flags of masking, which shards with masks do not need."""
    given = {
        "--masked-lm-prob": loader.masked_lm_prob is not None,
        "--whole-word-mask": loader.whole_word_mask,
    }
    without_effect = [name for name, is_given in given.items() if is_given]
    if without_effect:
        raise UserError(
            f"{without_effect[0]} has no effect: the shards in {dataset.folder} were made with "
            "masks: leave it out, or make shards with --dynamic-masking"
        )


def choose_masking(
    dataset: PretrainingDataset, tokenizer: Tokenizer, loader: LoaderConfig, is_held_out: bool
) -> Masking:
    """How the masks of shards without masks are drawn."""
    rate: float | str = DEFAULT_RATE
    if not is_held_out:
        rate = loader.masked_lm_prob or DEFAULT_RATE
    needed = max_masked_at(rate, dataset.sequence_length)
    max_masked = needed
    if not is_held_out:
        max_masked = loader.max_masked or needed
    if max_masked < needed:
        raise UserError(
            f"--max-predictions-per-seq {max_masked} is too low: --masked-lm-prob {rate} of "
            f"{dataset.sequence_length} tokens takes {needed}: give that, leave the flag out, or "
            f"lower --masked-lm-prob"
        )
    return Masking(tokenizer, rate, max_masked, loader.whole_word_mask)


def files_digest(datasets: list[PretrainingDataset]) -> str:
    """Digest of the sizes and times of all shards: while it is the same, so is what samples'
    digests do not read.
    """
    statuses = [shard.path.stat() for dataset in datasets for shard in dataset.shards]
    return json_digest([[status.st_size, status.st_mtime_ns] for status in statuses])


def verify_checksums(
    datasets: list[PretrainingDataset], distributed: DistributedContext, reason: str
) -> None:
    """Compares the shards with their checksums; each rank reads its share of them. Raises UserError
    on all ranks if a shard differs; a warning says how many have no checksums. reason: what the
    line that is printed begins with.
    """
    error: UserError | None = None
    shards = [shard for dataset in datasets for shard in dataset.shards]
    with progress_bar(None, "verifying shards", "shard", enabled=distributed.is_main) as bar:
        for shard in shards[distributed.rank :: distributed.world_size]:
            try:
                shard.verify_checksums()
            except UserError as raised:
                error = error or raised
            bar.update()
    (failures,) = distributed.all_reduce_sum([error is not None])
    if failures:
        raise error or PeerError("another process found a damaged shard")
    without = [shard for shard in shards if not shard.has_checksums]
    if distributed.is_main:
        num_verified = len(shards) - len(without)
        line = f"{reason}: {num_verified} of {len(shards)} shards match their checksums"
        if without:
            line = (
                f"warning: {line}; {len(without)} have none, such as {without[0].path}: changes "
                "may go unnoticed"
            )
        print_line(line)
