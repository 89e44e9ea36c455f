"""RoBERTa, XLM-RoBERTa and ModernBERT: every program works with them, with byte-level BPE, Unigram
and WordPiece tokenizers. Their logits and folders: test_encoders.py.
"""

import json

import pytest
import tokenizers
import transformers
from conftest import ROOT, TINY, VOCAB_FILE, assert_refused, read_json, write_json_lines
from encoder_cases import MODERNBERT
from pretraining_from_text import pretrain
from small_runs import run_here
from tokenizer_kinds import file_of, ours

import inference
import run_embeddings
import run_glue
import run_ner
import run_squad
from bert_recipe.utils.errors import UserError

SQUAD = ROOT / "data" / "sample" / "squad"
FAMILY = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "modernbert": "ModernBert"}


@pytest.fixture(scope="module", params=["roberta", "xlm-r", "modernbert"])
def pretrained(request, inputs, tmp_path_factory):
    """A checkpoint of two updates, from text."""
    kind = {"xlm-r": "xlm-roberta"}.get(request.param, request.param)
    if kind == "modernbert":
        tokenizer = VOCAB_FILE
        config = MODERNBERT | {"vocab_size": TINY["vocab_size"], "max_position_embeddings": 64}
    else:
        tokenizer = file_of(request.param)
        config = {**TINY, "model_type": kind, "pad_token_id": 1}
        config |= {
            "vocab_size": ours(request.param).vocab_size,
            "max_position_embeddings": 66,
            "type_vocab_size": 1,
        }
    flags = ("--no-nsp", "--max-predictions-per-seq", 5)
    folder, command = pretrain(
        inputs, tmp_path_factory.mktemp("pretrained"), tokenizer, config, *flags
    )
    return folder, kind, command


def test_programs_pre_train_fine_tune_and_predict(pretrained, tmp_path, capsys):
    folder, kind, _ = pretrained
    assert (
        type(transformers.AutoModelForMaskedLM.from_pretrained(folder)).__name__
        == f"{FAMILY[kind]}ForMaskedLM"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer("a", "b")["input_ids"].count(tokenizer.sep_token_id) == (
        2 if kind == "modernbert" else 3
    )
    device, mask = ("--device", "cpu"), tokenizer.mask_token
    assert (
        inference.main(["--init-checkpoint", str(folder), "--fill-mask", f"the {mask} is", *device])
        == 0
    )
    shared = [
        "--init-checkpoint",
        str(folder),
        "--output-dir",
        str(tmp_path),
        "--do-train",
        *device,
    ]
    shared += [
        "--max-steps",
        "1",
        "--report-file",
        str(tmp_path / "report.json"),
    ]

    (tmp_path / "texts.csv").write_text("text,label\n" + "good,one\nbad,two\n" * 8)
    texts = (
        "--train-file",
        str(tmp_path / "texts.csv"),
        "--text-column",
        "text",
        "--label-column",
        "label",
    )
    assert run_glue.main([*shared, *texts]) == 0
    assert run_embeddings.main([*shared, *texts[:4], "--pair-column", "label"]) == 0
    rows = [{"text": "good bad", "labels": ["one", "two"]}, {"text": "bad", "labels": []}] * 4
    write_json_lines(tmp_path / "many.jsonl", rows)
    many = (
        "--train-file",
        str(tmp_path / "many.jsonl"),
        "--text-column",
        "text",
        "--label-column",
        "labels",
    )
    assert (
        run_glue.main(
            [*shared, *many, "--task-name", "multi-label", "--output-dir", str(tmp_path / "many")]
        )
        == 0
    )
    rows = [{"text": "Anna saw Zo\u00e9.", "spans": [{"start": 0, "end": 4, "label": "PER"}]}] * 4
    write_json_lines(tmp_path / "tags.jsonl", rows)
    assert run_ner.main([*shared, "--train-file", str(tmp_path / "tags.jsonl")]) == 0
    assert run_squad.main([*shared, "--train-file", str(SQUAD / "train-v1.1.json")]) == 0

    capsys.readouterr()
    embed = (
        "--embed",
        "--input",
        texts[1],
        "--text-column",
        "text",
        "--output",
        str(tmp_path / "vectors.npy"),
    )
    for place, asked in {
        tmp_path / "custom" / "classification": ("--text", "good"),
        tmp_path / "many" / "custom" / "multi-label": ("--text", "good"),
        tmp_path / "custom" / "embedding": embed,
        tmp_path / "custom" / "ner": ("--text", "Anna saw"),
        tmp_path / "custom" / "squad": ("--question", "Who?", "--context", "Anna lived in Paris."),
    }.items():
        place = (
            place
            if place.is_dir()
            else next(path for path in place.parent.iterdir() if path.is_dir())
        )
        assert inference.main(["--init-checkpoint", str(place), *asked, *device]) == 0, place
    classifier = str(tmp_path / "custom" / "classification")
    wrong = ("--init-checkpoint", classifier, "--output-dir", str(tmp_path / "wrong"), *device)
    with pytest.raises(
        UserError,
        match=f"holds a {FAMILY[kind]}ForSequenceClassification: it was not fine-tuned for",
    ):
        run_squad.main([*wrong, "--do-predict", "--predict-file", str(SQUAD / "dev-v1.1.json")])
    with pytest.raises(
        UserError, match=f"a {FAMILY[kind]}ForSequenceClassification: use another model"
    ):
        inference.main(
            ["--init-checkpoint", classifier, "--question", "Who?", "--context", "Anna.", *device]
        )
    assert inference.main(["--init-checkpoint", str(folder), *embed, *device]) == 0


def test_what_does_not_fit_roberta_is_refused(pretrained, tmp_path):
    folder, kind, command = pretrained
    refused = run_here([*command, "--output-dir", str(tmp_path), "--pre-layer-norm"])
    assert_refused(refused, "--pre-layer-norm is not for", kind)
    if kind == "modernbert":
        return
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**read_json(folder / "config.json"), "pad_token_id": 0}))
    refused = run_here([*command, "--output-dir", str(tmp_path), "--config-file", str(config)])
    assert_refused(refused, "pad_token_id is 0, and the tokenizer's is 1")
    with pytest.raises(UserError, match="64 positions"):
        inference.main(
            ["--init-checkpoint", str(folder), "--fill-mask", "a", "--max-seq-length", "65"]
        )


def test_the_length_of_a_model_with_padding_3_is_510_in_programs_too(tmp_path, capsys):
    tokens = ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "one", "two"]
    words = tokenizers.models.WordLevel(dict(zip(tokens, range(7), strict=True)), "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(tokens[:5])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {**TINY, "vocab_size": 7, "max_position_embeddings": 514, "type_vocab_size": 1}
    config = transformers.RobertaConfig(**sizes, pad_token_id=3)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    text = "one two " * 254
    ask = ["--init-checkpoint", str(tmp_path), "--device", "cpu", "--max-seq-length"]
    assert inference.main([*ask, "510", "--fill-mask", f"{text[:-4]}<mask>"]) == 0
    assert "one" in capsys.readouterr().out
    with pytest.raises(UserError, match="510 positions"):
        inference.main([*ask, "511", "--fill-mask", "one <mask>"])
