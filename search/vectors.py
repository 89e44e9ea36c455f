"""The vectors of a corpus, in files beside it, and the texts nearest to a query.

Legend: n queries, m texts of a part of the corpus, k results, E hidden size.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from search.corpus import Corpus
from tasks.predictors import EmbeddingPredictor
from tasks.retrieval import NearestRows, normalized
from tasks.sentence_folders import EmbeddingSettings
from utils.files import LOCK_FILE, file_digest, json_digest, lock_folder
from utils.progress import print_line, progress_bar
from work_units.executors import InProcessExecutor
from work_units.units import WorkUnit, read_record, run_units

ROWS_PER_PART = 4096


class TextEmbedder:
    """Normalized vectors of queries and documents, each after the prompt of the model's folder."""

    def __init__(self, predictor: EmbeddingPredictor):
        self.predictor = predictor
        self.settings = EmbeddingSettings.read(predictor.folder)

    def prepare(
        self, prompt: str, texts: Sequence[str], places: Sequence[str]
    ) -> Callable[[], np.ndarray]:
        """Tokenizes and checks `texts`; returns a function that embeds them. places: their names in
        errors.
        """
        rows = [{"text": self.settings.prompted(prompt, text)} for text in texts]
        dataset = self.predictor.text_dataset(list(places), rows)
        return lambda: normalized(self.predictor.logits(dataset, "sequence"))

    def embed(self, prompt: str, texts: Sequence[str], places: Sequence[str]) -> np.ndarray:
        return self.prepare(prompt, texts, places)()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the vector of a text depends on: the model's files, precision and length."""
        folder, predictor = self.predictor.folder, self.predictor
        files = [*folder.glob("*"), *folder.glob("*/config.json")]
        return {
            "files": {
                str(path.relative_to(folder)): file_digest(path)
                for path in sorted(files)
                if path.is_file() and path.name != LOCK_FILE
            },
            "types": sorted({str(each.dtype) for each in predictor.model.parameters()}),
            "max_seq_length": predictor.options.max_seq_length,
            "truncate": predictor.truncate,
        }


class CorpusVectors:
    """The vectors of a corpus as memory-mapped arrays [m, E], one for each ROWS_PER_PART texts."""

    def __init__(self, parts: Sequence[Path]):
        self.parts = parts

    @classmethod
    def make(cls, embedder: TextEmbedder, corpus: Corpus) -> "CorpusVectors":
        """Embeds the texts that have no vectors yet. The folder's name identifies model and texts,
        so that other ones get another folder. If interrupted, rerun the same command to resume.
        """
        identity = json_digest([embedder.identity, corpus.texts])[:16]
        folder = corpus.path.with_name(f"{corpus.path.name}.vectors-{identity}")
        units, is_complete = [], True
        for first in range(0, len(corpus.texts), ROWS_PER_PART):
            name = f"{first:09}.npy"
            rows = slice(first, first + ROWS_PER_PART)
            embed = None
            if read_record(folder, name) is None:
                # All texts are checked before the first one is embedded.
                embed = embedder.prepare("document", corpus.texts[rows], corpus.places[rows])
                is_complete = False
            units.append(WorkUnit(name, write_vectors, (embed,), len(corpus.texts[rows])))
        if is_complete:
            print_line(f"vectors of {len(corpus.texts):,} texts in {folder}")
        bar = progress_bar(len(corpus.texts), "embedding the corpus", "text")
        with closing(lock_folder(folder)), bar as shown:
            run_units(folder, units, InProcessExecutor(), shown.update)
        return cls([folder / unit.output for unit in units])

    @cached_property
    def arrays(self) -> list[torch.Tensor]:
        """Mapped once: the first read of each page of a new mapping takes longer than the rest."""
        # torch takes writable arrays only.
        return [torch.from_numpy(np.load(path, mmap_mode="c")) for path in self.parts]

    def nearest(self, queries_nE: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows [n, k] of the nearest texts, best first, and their cosines. k: `count`, or the
        size of a smaller corpus. Of texts with equal cosines, the first one comes first.
        """
        best = NearestRows(len(queries_nE), count)
        queries = torch.from_numpy(queries_nE)
        for vectors_mE in self.arrays:
            # numpy's products are many times slower where other programs want the cores too. The
            # threads divide the rows of a product, so the vectors are its rows, not the queries.
            best.add((vectors_mE @ queries.T).T.numpy())
        return best.rows, best.scores


def write_vectors(path: Path, embed: Callable[[], np.ndarray]) -> dict[str, Any]:
    content = io.BytesIO()
    np.save(content, embed())
    path.write_bytes(content.getvalue())
    return {}
