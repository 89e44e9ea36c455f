"""Converts compressed or chunked HDF5 shards, such as NVIDIA's, to contiguous ones, which training
reads row by row.

Each shard is written beside its final path, compared with the original row for row, and then
renamed. A run that was stopped continues with the shards that are left.
"""

from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_recipe.data_loading.hdf5_shards import SHARD_SUFFIXES, Shard, find_shards
from bert_recipe.data_preparation.samples.hdf5_writer import sample_layout, write_hdf5
from bert_recipe.data_preparation.samples.verify import shard_folders
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_path, lock_folder
from bert_recipe.utils.progress import print_line, progress_bar

BLOCK_ROWS = 1 << 14  # rows written and compared at a time


def repack_folders(root: Path, output_dir: Path | None, executor: Executor, dry_run: bool) -> None:
    """Repacks the shards in `root` and its folders: in place, or to the same relative paths in
    `output_dir`.
    """
    shards = [path for folder in shard_folders(root) for path in find_shards(folder)]
    if output_dir is not None and root.resolve() in output_dir.resolve().parents:
        made = output_dir.resolve()  # of an earlier run
        shards = [path for path in shards if made not in path.resolve().parents]
    pairs = [(path, output_dir / path.relative_to(root) if output_dir else path) for path in shards]
    to_do = [(source, target) for source, target in pairs if not is_repacked(source, target)]
    size = sum(source.stat().st_size for source, _ in to_do)
    print_line(f"{len(to_do)} of {len(pairs)} shards to repack, {tqdm.format_sizeof(size, 'B')}")
    if dry_run:
        print_line("(dry run: nothing was done)")
        return
    with closing(lock_folder(output_dir or root)), progress_bar(size, "repack") as bar:
        for leftover in (output_dir or root).rglob("*.tmp-*"):
            if (
                Path(leftover.name.partition(".tmp-")[0]).suffix in SHARD_SUFFIXES
            ):  # of a killed run
                leftover.unlink()
        for source_bytes in executor.map(repack_shard, to_do):
            bar.update(source_bytes)
    written = sum(target.stat().st_size for _, target in to_do)
    print_line(
        f"{len(to_do)} shards repacked and verified, {tqdm.format_sizeof(written, 'B')} in "
        f"{output_dir or root}"
    )


def is_repacked(source: Path, target: Path) -> bool:
    """Whether `target` is contiguous and was made from `source`. An empty shard stores nothing."""
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        return False
    shard = Shard(target)
    if not len(shard):
        return not len(Shard(source))
    return shard.is_contiguous and (source == target or shard.digest == Shard(source).digest)


def repack_shard(paths: tuple[Path, Path]) -> int:
    """Repacks one shard and returns its former size. Raises UserError if it is damaged."""
    source, target = paths
    source_bytes = source.stat().st_size
    shard = Shard(source)
    shard.verify_checksums()
    highest_id = 0
    for key in ("input_ids", "masked_lm_ids"):
        for rows in shard.blocks(BLOCK_ROWS):
            highest_id = max(highest_id, int(shard.read(key, rows).max(initial=0)))
    id_dtype = np.dtype(np.uint16 if highest_id < 1 << 16 else np.uint32)
    layout = sample_layout(len(shard), shard.sequence_length, shard.max_masked, id_dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as unverified:
        blocks = ([shard.read(key, rows) for key in layout] for rows in shard.blocks(BLOCK_ROWS))
        write_hdf5(unverified, layout, shard.attributes, blocks)
        compare(shard, Shard(unverified))
    return source_bytes


def compare(original: Shard, copy: Shard) -> None:
    """Raises UserError for the first row that differs, such as one with a negative id, which no
    copy has.
    """
    copy.verify_checksums()
    for key in original.layouts:
        for rows in original.blocks(BLOCK_ROWS):
            ours, theirs = copy.read(key, rows), original.read(key, rows)
            differs = (ours != theirs).reshape(len(ours), -1).any(axis=1)
            if differs.any():
                row = rows[differs.argmax()]
                raise UserError(
                    f"shard {original.path}, row {row}: {key} has a value that no shard can have: "
                    "the shard is damaged, make or download it again"
                )
