"""What a folder declares about the tokens around texts and about token types is what is done here,
and what is written makes transformers do the same.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import TINY, VOCAB_FILE
from tokenizer_kinds import file_of
from tokenizers import processors

from bert_recipe.data_preparation.samples.create_shards import check_layout
from bert_recipe.model.encoders.registry import config_from_dict
from bert_recipe.tasks.text_sequences import SequenceDataset, TextDataset
from bert_recipe.tokenization.files import TOKENIZER_FILES
from bert_recipe.tokenization.tokenizer import load_tokenizer, model_files
from bert_recipe.utils.errors import UserError

pytestmark = pytest.mark.fast

TEXTS = ("A gripping film, 1945", "The ship is lost.")
TEMPLATES = {
    "BERT": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "no types": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "RoBERTa": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "first only": ("[CLS] $A", "[CLS] $A $B:1"),
    "last only": ("$A [SEP]", "$A [SEP] $B:1 [SEP]:1"),
    "second [CLS]": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [CLS]:1 $B:1 [SEP]:1"),
    "two": ("[CLS] [MASK] $A [SEP]", "[CLS] [MASK] $A [SEP] [MASK]:1 $B:1 [SEP]:1"),
    "nothing": None,
}
CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizer")
NAMES = {
    "unsaid": None,
    "types": ["input_ids", "token_type_ids", "attention_mask"],
    "no types": ["input_ids", "attention_mask"],
}


VOCABULARY = VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:3000]  # each test writes them


@cache
def content(kind: str) -> str:
    if kind == "bert":
        vocabulary = {word: place for place, word in enumerate(VOCABULARY)}
        return tokenizers.BertWordPieceTokenizer(vocabulary)._tokenizer.to_str()
    return file_of(kind).read_text()


def write_folder(folder: Path, kind: str, template, class_name=None, **settings) -> Path:
    folder.mkdir()
    made = tokenizers.Tokenizer.from_str(content(kind))
    values = json.loads(content(kind)) | {"post_processor": None}
    if template is not None:
        ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]", "[MASK]")]
        single, pair = template
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=ids
        )
        values = json.loads(made.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(values))
    given = {"tokenizer_class": class_name, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def ours(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and types of a text, and of a pair."""
    tokenizer = load_tokenizer(folder)
    first, second = (tokenizer.encode_text(text)[0] for text in TEXTS)
    dataset = SequenceDataset(tokenizer, [[first], [first, second]], {})
    streams = [dataset.stream(np.array([row])) for row in range(2)]
    num_after = tokenizer.layout(2).num_after
    assert dataset.second_starts[1] == dataset.lengths[1] - len(second) - num_after
    return [(stream["input_ids"].tolist(), stream["token_type_ids"].tolist()) for stream in streams]


def theirs(folder: Path) -> list[tuple[list[int], list[int]]]:
    """As a model gets them: without token types, they are 0."""
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    sequences = []
    for texts in (TEXTS[:1], TEXTS):
        encoded = peer(*texts)
        ids = encoded["input_ids"]
        sequences.append((ids, encoded.get("token_type_ids", [0] * len(ids))))
    return sequences


def written(source: Path, folder: Path, model_type: str, **values) -> Path:
    """What a model folder has of the tokenizer in `source`."""
    folder.mkdir()
    tokenizer = load_tokenizer(source)
    config = config_from_dict({**TINY, "model_type": model_type, **values})
    files = model_files(tokenizer, 64, config.needs_tokenizer_json, config.takes_token_types)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("kind", ["bert", "bpe"])
@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_sequences_are_those_of_transformers_before_and_after_a_run(
    template, class_name, kind, tmp_path
):
    """Where one says nothing that is used, the other does not either, or it is refused."""
    source = write_folder(tmp_path / "source", kind, TEMPLATES[template], class_name)
    try:
        expected = ours(source)
    except UserError as error:
        assert template == "nothing"
        assert "puts no special tokens around a text: give it a post_processor" in str(error)
        assert class_name in CLASSES[1:3]
        return
    assert template != "nothing" or class_name not in CLASSES[1:3]
    folder = written(source, tmp_path / "written", "bert")
    assert theirs(folder) == expected == ours(folder)
    assert load_tokenizer(folder).vocab_sha256 == load_tokenizer(source).vocab_sha256
    if class_name == "TokenizersBackend":  # of which version 5 says all
        assert theirs(source) == expected


@pytest.mark.parametrize("kind", ["bert", "bpe"])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("class_name", CLASSES[1:3])
@pytest.mark.parametrize(
    ("model_type", "types"), [("bert", 2), ("bert", 1), ("electra", 2), ("distilbert", 0)]
)
def test_token_types_are_those_that_the_folder_declares(
    model_type, types, class_name, names, kind, tmp_path
):
    source = write_folder(
        tmp_path / "source", kind, TEMPLATES["BERT"], class_name, model_input_names=NAMES[names]
    )
    layouts = ours(source)
    has_types = names == "types" or (names == "unsaid" and class_name != "TokenizersBackend")
    assert any(layouts[1][1]) == has_types
    if names != "unsaid" or class_name == "TokenizersBackend":
        assert theirs(source) == layouts
    folder = written(source, tmp_path / "written", model_type, type_vocab_size=types or 2)
    declared = json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"]
    assert ("token_type_ids" in declared) == (has_types and types == 2)
    if types == 2:
        assert theirs(folder) == layouts == ours(folder)


@pytest.mark.parametrize("class_name", ["BertTokenizer", None, "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("has_list", [True, False])
def test_the_casing_is_that_of_the_file_which_transformers_takes(
    has_list, lower, class_name, tmp_path
):
    """The config's where it makes a BertTokenizer, the tokenizer.json's otherwise."""
    source = write_folder(
        tmp_path / "a", "bert", TEMPLATES["BERT"], class_name, do_lower_case=lower
    )
    (source / "config.json").write_text(json.dumps({"model_type": "bert"}))
    if has_list and class_name != "PreTrainedTokenizerFast":
        (source / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    peer = transformers.AutoTokenizer.from_pretrained(source)
    text = "A Ship caf\u00e9"
    expected = peer(text, add_special_tokens=False)["input_ids"]
    assert load_tokenizer(source).encode(text) == expected


WAY_OUT = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": NAMES["types"]}
MODEL_CLASSES = {
    "bert": (*CLASSES, "BertTokenizerFast", "DistilBertTokenizer", "ElectraTokenizerFast"),
    "electra": (None, "ElectraTokenizer", "PreTrainedTokenizerFast"),
    "modernbert": (None, "BertTokenizer", "PreTrainedTokenizerFast"),
}
IN_MODEL_FOLDERS = [
    (model_type, name, kind, template)
    for model_type, names in MODEL_CLASSES.items()
    for name in names
    for kind in ("bert", "bpe")
    for template in TEMPLATES
    if template != "nothing"
]


@pytest.mark.parametrize(("model_type", "class_name", "kind", "template"), IN_MODEL_FOLDERS)
def test_a_models_folder_is_read_as_by_transformers_or_refused(
    model_type, class_name, kind, template, tmp_path
):
    """Also where its class makes something else of the file; the refusal's way out makes both
    equal.
    """
    folder = write_folder(tmp_path / "a", kind, TEMPLATES[template], class_name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "model.safetensors").touch()
    types = model_type != "modernbert"  # which takes none
    try:
        sequences = ours(folder)
    except UserError as error:
        assert '"model_input_names": [' in str(error)
        is_usual = kind == "bert" and template == "BERT"
        assert not is_usual or class_name in ("PreTrainedTokenizerFast", "DistilBertTokenizer")
        settings = json.dumps(WAY_OUT)
        (folder / "tokenizer_config.json").write_text(settings)
        sequences = ours(folder)
    expected = theirs(folder)
    assert [ids for ids, _ in sequences] == [ids for ids, _ in expected]
    assert not types or sequences == expected


@pytest.mark.parametrize("settings", [{}, {"strip_accents": False}, {"do_lower_case": False}])
@pytest.mark.parametrize("normalizer", ["cased", "accents", "chinese", "clean"])
def test_the_normalizer_of_a_models_folder_is_that_of_its_class_or_refused(
    normalizer, settings, tmp_path
):
    folder = write_folder(tmp_path / "a", "bert", TEMPLATES["BERT"], "BertTokenizer", **settings)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "model.safetensors").touch()
    values = json.loads((folder / "tokenizer.json").read_text())
    key, value = {
        "cased": ("lowercase", False),
        "accents": ("strip_accents", False),
        "chinese": ("handle_chinese_chars", False),
        "clean": ("clean_text", False),
    }[normalizer]
    values["normalizer"][key] = value
    (folder / "tokenizer.json").write_text(json.dumps(values))
    text = "A Ship caf\u00e9 \u4e2dab a\x07b"
    try:
        ids = load_tokenizer(folder).encode(text)
    except UserError as error:
        assert "transformers 5 makes BertTokenizer of the folder" in str(error)
        (folder / "tokenizer_config.json").write_text(json.dumps(WAY_OUT))
        ids = load_tokenizer(folder).encode(text)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    assert ids == peer(text, add_special_tokens=False)["input_ids"]


def test_files_beside_a_vocabulary_of_another_name_say_nothing_about_it(tmp_path):
    shutil.copyfile(VOCAB_FILE, tmp_path / "law.txt")
    expected = load_tokenizer(tmp_path / "law.txt")
    shutil.copyfile(file_of("bpe"), tmp_path / "law.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}
    roles = {f"{role}_token": "the" for role in ("cls", "sep", "pad", "unk", "mask")}
    for name in TOKENIZER_FILES[2:]:
        (tmp_path / name).write_text(json.dumps(named | roles))
    assert load_tokenizer(tmp_path / "law.txt").casing_settings() == expected.casing_settings()
    assert load_tokenizer(tmp_path / "law.json").special_tokens["mask_token"] == "[MASK]"


def test_texts_are_cut_to_the_length_with_all_that_is_put_around_them(tmp_path):
    source = write_folder(tmp_path / "a", "bpe", TEMPLATES["two"], "TokenizersBackend")
    tokenizer = load_tokenizer(source)
    peer = transformers.AutoTokenizer.from_pretrained(source)
    long, short = " ".join(TEXTS * 4), TEXTS[1]
    single = TextDataset(tokenizer, 16, [long])
    pair = TextDataset(tokenizer, 16, [long], [short])
    assert single.lengths.tolist() == pair.lengths.tolist() == [16]
    expected = peer(long, truncation=True, max_length=16)["input_ids"]
    assert single.input_ids.tolist() == expected


def test_samples_are_made_only_of_what_the_tokenizer_puts_around_texts(tmp_path):
    for number, (template, parts) in enumerate(TEMPLATES.items()):
        folder = write_folder(tmp_path / str(number), "bpe", parts, "TokenizersBackend")
        for has_pairs in (True, False):
            fits = template in ("BERT", "no types")
            fits |= template in ("RoBERTa", "second [CLS]") and not has_pairs
            if fits:
                check_layout(load_tokenizer(folder), has_pairs)
                continue
            with pytest.raises(UserError, match=r"post_processor|RoBERTa's kind"):
                check_layout(load_tokenizer(folder), has_pairs)


def test_a_model_of_pairs_gives_the_logits_of_transformers(tmp_path):
    """Also where the types of a pair decide."""
    from bert_recipe import BertForSequenceClassification
    from bert_recipe.model.token_stream import TokenStream

    torch.manual_seed(0)
    size = load_tokenizer(file_of("bpe")).vocab_size
    config = transformers.BertConfig(**{**TINY, "vocab_size": size, "initializer_range": 0.5})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "source")
    shutil.copyfile(file_of("bpe"), tmp_path / "source" / "tokenizer.json")
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(WAY_OUT))
    model = BertForSequenceClassification.from_pretrained(tmp_path / "source")
    tokenizer = load_tokenizer(tmp_path / "source")
    model.save_pretrained(tmp_path / "ours", tokenizer)
    dataset = TextDataset(tokenizer, 64, TEXTS[:1], TEXTS[1:])
    stream = {name: torch.tensor(value) for name, value in dataset.stream(np.array([0])).items()}
    expected = model(TokenStream.from_batch(stream, int(dataset.lengths[0]))).logits
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    folder = tmp_path / "ours"
    their_model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits = their_model(**peer(*TEXTS, return_tensors="pt")).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
