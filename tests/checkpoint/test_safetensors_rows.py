"""safetensors files written by rows and read by rows, against the safetensors library."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bert_recipe.checkpoint.rows import (
    DTYPE_NAMES,
    TensorRows,
    create_file,
    file_layout,
    open_safetensors,
    write_rows,
)
from bert_recipe.utils.errors import UserError

TENSORS = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(list(DTYPE_NAMES))),
    max_size=5,
)


@given(specification=TENSORS, world_size=st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_file_written_by_several_ranks_is_read_by_the_library(tmp_path, specification, world_size):
    torch.manual_seed(0)
    tensors = {
        name: (torch.randn(shape) * 100).to(dtype) for name, (shape, dtype) in specification.items()
    }
    path = tmp_path / "file.safetensors"
    path.unlink(missing_ok=True)
    layouts = []
    for rank in range(world_size):
        rows = []
        for name, tensor in tensors.items():
            if not tensor.dim():
                rows.append(TensorRows(name, (), tensor))
                continue
            start, stop = (len(tensor) * r // world_size for r in (rank, rank + 1))
            rows.append(TensorRows(name, tuple(tensor.shape), tensor[start:stop], start))
        layouts.append(file_layout(reversed(rows)))
        if rank == 0:
            create_file(path, layouts[0])
        write_rows(path, layouts[rank], rows)
    assert all(layout == layouts[0] for layout in layouts)
    assert path.stat().st_size == layouts[0].size
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_gives_tensors_or_an_error_that_names_it(tmp_path, data):
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        for tensor in open_safetensors(path).values():
            assert tensor.read().shape == tensor.shape
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("twice", ["a", "__metadata__"])
def test_a_name_twice_in_the_header_is_refused(tmp_path, twice):
    """safetensors takes the last one."""
    save_file({"a": torch.ones(2)}, tmp_path / "file", metadata={"format": "pt"})
    content = (tmp_path / "file").read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    header = json.dumps(entries)[:-1] + f', "{twice}": {json.dumps(entries[twice])}}}'
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + content[8 + size :])
    with pytest.raises(UserError, match=r"given twice|duplicate field"):
        open_safetensors(path)
