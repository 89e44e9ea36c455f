"""Words of a new text in a model's vocabulary, and a whole new vocabulary for a model, held to
transformers.
"""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, VOCAB_FILE, read_json
from huggingface_hub import ModelCard as HubCard
from small_runs import run_here
from tokenizer_kinds import file_of, sample_texts

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.data_preparation.text import model_vocabulary
from bert_recipe.data_preparation.text.model_vocabulary import extended_vocabulary, most_split_words
from bert_recipe.model.encoders.registry import MODELS
from bert_recipe.model.encoders.roberta import RobertaConfig
from bert_recipe.tokenization.files import find_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer
from data import prepare

TEXT = [line.strip() for line in sample_texts()[400:900] if line.strip()]
NEW = ["pneumoconiosis", "thrombocytopenia", "immunohistochemistry", "glioblastoma", "zygotic"]
LINES = [
    f"{line} The {NEW[place % 5]} of ({NEW[place % 3]}) rose; {place % 7} cases."
    for place, line in enumerate(TEXT)
]


@pytest.fixture
def model(tmp_path):
    """Saves a small model with transformers, by the kind of its tokenizer; its folder."""

    def make(kind: str) -> Path:
        torch.manual_seed(0)
        file = VOCAB_FILE if kind == "wordpiece" else file_of(kind)
        config = {**TINY, "initializer_range": 0.3, "vocab_size": load_tokenizer(file).vocab_size}
        if kind == "modernbert":
            for name in ("hidden_act", "layer_norm_eps", "type_vocab_size", "hidden_dropout_prob"):
                del config[name]
            made = transformers.ModernBertForMaskedLM(
                transformers.ModernBertConfig(**config, pad_token_id=0)
            )
        elif kind == "roberta":
            made = transformers.RobertaForMaskedLM(
                transformers.RobertaConfig(**config, pad_token_id=1)
            )
        elif kind == "wordpiece":
            made = transformers.BertForPreTraining(transformers.BertConfig(**config))
        else:
            # Padded.
            made = transformers.BertForMaskedLM(
                transformers.BertConfig(**config | {"vocab_size": 640})
            )
        with torch.no_grad():
            made.get_output_embeddings().bias.normal_()
        made.save_pretrained(tmp_path / kind)
        (tmp_path / kind / file.name.replace("bert-base-uncased-vocab", "vocab")).write_bytes(
            file.read_bytes()
        )
        if kind == "bpe":
            declared = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            }
            (tmp_path / kind / "tokenizer_config.json").write_text(json.dumps(declared))
        return tmp_path / kind

    return make


def change(tmp_path: Path, *flags: object) -> Path:
    (tmp_path / "text").mkdir(exist_ok=True)
    (tmp_path / "text" / "new.txt").write_text("\n".join(LINES))
    words = [
        "vocabulary",
        "--sharded",
        tmp_path / "text",
        "--output-dir",
        tmp_path / "out",
        "--num-workers",
        1,
        *flags,
    ]
    prepare.main([str(word) for word in words])
    return tmp_path / "out" / "vocab"


def parameters(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Word embeddings and the decoder's bias, as transformers loads them."""
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    return (
        loaded.get_input_embeddings().weight.detach(),
        loaded.get_output_embeddings().bias.detach(),
    )


def has_new_word(line: str, words: list[str], kind: str) -> bool:
    end = "" if kind == "wordpiece" else r"(?!\w)"
    return (
        re.search(
            rf"(?<!\w)({'|'.join(words)}){end}", line.lower() if kind == "wordpiece" else line
        )
        is not None
    )


@pytest.mark.parametrize(
    ("kind", "unused"), [("wordpiece", 994), ("bpe", 3), ("modernbert", 83), ("roberta", 0)]
)
def test_words_of_a_text_are_added_and_other_text_is_encoded_as_before(
    kind, unused, model, tmp_path, capsys
):
    source = model(kind)
    result = change(tmp_path, "--extend", source, "--add", 20)
    made = result / f"{kind}-out"  # of the model and the output folder
    old = load_tokenizer(find_tokenizer(source))
    new = load_tokenizer(find_tokenizer(made))
    words = [
        line.split("\t")[0] for line in (result / "new_words.tsv").read_text().splitlines()[1:]
    ]
    assert set(NEW) <= set(words) and len(words) == 20
    assert new.vocab_size == max(old.vocab_size, old.vocab_size + 20 - unused)
    reused = [token for token in new.vocab if token in words and new.vocab[token] < old.vocab_size]
    assert len(reused) == min(unused, 20)

    peer = transformers.AutoTokenizer.from_pretrained(made)
    unchanged = [line for line in TEXT if not has_new_word(line, words, kind)]
    assert len(unchanged) > 30
    for line in unchanged:
        assert new.encode(line) == old.encode(line)
    for line in LINES:
        assert (
            peer(line, add_special_tokens=False)["input_ids"]
            == new.encode(line)
            == lines_of(new, line)
        )
        assert len(new.encode(line)) < len(old.encode(line))
    for word in NEW:
        assert new.tokenize(f"the {word}, ({word})").count(word) == 2
    card = HubCard.load(made / "README.md")
    assert card.data.base_model == kind and card.data.pipeline_tag == "fill-mask"
    assert f"# {kind}-out" in card.text and "| words added | 20 |" in card.text
    before, after = (len(lines_of(tokenizer, "\n".join(LINES))) for tokenizer in (old, new))
    out = capsys.readouterr().out
    assert (
        f"{before:,} tokens of the text before" in out
        and f"{after:,} tokens of the text after" in out
    )

    (rows, bias), (old_rows, old_bias) = parameters(made), parameters(source)
    assert len(rows) == max(len(old_rows), new.vocab_size)
    kept = [token_id for token, token_id in new.vocab.items() if old.vocab.get(token) == token_id]
    assert len(kept) == new.vocab_size - 20
    torch.testing.assert_close(rows[kept], old_rows[kept], rtol=0, atol=0)
    torch.testing.assert_close(bias[kept], old_bias[kept], rtol=0, atol=0)
    for word in words:
        pieces = old.encode(f" {word}")
        torch.testing.assert_close(rows[new.vocab[word]], old_rows[pieces].mean(0))
        torch.testing.assert_close(bias[new.vocab[word]], old_bias[pieces].mean())


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("患者服用二甲双胍。", "患|者|服|用|二|甲|双|胍"),
        ("शर्करा घटती है।", "शर्करा|घटती|है"),
        ("กินยาทุกวัน", "กิ|น|ย|า|ทุ|ก|วั"),
        ("환자는 메트포르민을 먹는다", "환자는|메트포르민을|먹는다"),
        ("يتناول مُحَمَّد ميتفورمين", "يتناول|مُحَمَّد|ميتفورمين"),
        ("مصرف می\u200cشود", "مصرف|می\u200cشود"),
        ("the patient's metformin 😀", "patient|metformin"),
    ],
)
def test_new_words_are_words_in_any_script_and_become_tokens(text, new, tmp_path):
    (tmp_path / "a.txt").write_text(f"{text}\n" * 3)
    old = load_tokenizer(file_of("bpe"))
    words = most_split_words([tmp_path / "a.txt"], old, 30, lambda size: None)
    assert {word for word, _, _ in words} == set(new.split("|"))
    name, content = extended_vocabulary(old, [word for word, _, _ in words])
    (tmp_path / name).write_text(content)
    extended = load_tokenizer(tmp_path / name)
    assert set(new.split("|")) <= set(extended.tokenize(text))
    assert len(extended.encode(text)) < len(old.encode(text))


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("患者服用二甲双胍。", ""),  # BERT's rules divide it, and each character is a token
        ("กินยาทุกวัน และยา", "กิ|##ทุ|##วั"),
        ("ຢູ່ບ້ານ", "ຢູ່|##ບ້"),
        ("ខ្មែរ", "ខ្មែ"),
        ("तुम कहाँ हो", "तुम|कहाँ|हो"),
    ],
)
def test_new_words_of_a_vocabulary_of_bert_are_words_not_clauses(text, new, tmp_path):
    letters = sorted({*text} - {" "})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (tmp_path / "a.txt").write_text(f"{text}\n" * 3)
    old = load_tokenizer(tmp_path / "vocab.txt", True, strip_accents=False)
    words = most_split_words([tmp_path / "a.txt"], old, 30, lambda size: None)
    assert {word for word, _, _ in words} == set(filter(None, new.split("|")))
    name, content = extended_vocabulary(old, [word for word, _, _ in words])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text(content)
    extended = load_tokenizer(tmp_path / "new" / name, True, strip_accents=False)
    assert {word for word, _, _ in words} <= set(extended.tokenize(text))
    saved = sum(pieces - 1 for _, _, pieces in words)
    assert len(extended.encode(text)) <= len(old.encode(text)) - saved


def test_characters_of_a_token_of_two_are_no_new_words(tmp_path):
    """Added tokens would divide it."""
    (tmp_path / "a.txt").write_text("北京很大，北京好。\n" * 3)
    tokenizer = json.loads(file_of("bpe").read_text())
    token, *pieces = load_tokenizer(file_of("bpe")).tokenize("北京")
    for piece in pieces:
        tokenizer["model"]["merges"].append([token, piece])
        token += piece
        tokenizer["model"]["vocab"][token] = 1 + max(tokenizer["model"]["vocab"].values())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    old = load_tokenizer(tmp_path / "tokenizer.json")
    words = most_split_words([tmp_path / "a.txt"], old, 30, lambda size: None)
    assert {word for word, _, _ in words} == {"很", "大", "好"}


def lines_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode_lines(text.encode())[0].tolist()


def test_a_whole_new_vocabulary_keeps_the_rows_of_equal_tokens(model, tmp_path):
    source = model("wordpiece")
    flags = ("--vocab-size", 700, "--model-name", "my-model")
    result = change(tmp_path, "--replace", source, *flags) / "my-model"
    old = load_tokenizer(VOCAB_FILE)
    new = load_tokenizer(result / "vocab.txt", True)
    (rows, bias), (old_rows, old_bias) = parameters(result), parameters(source)
    assert rows.shape == (700, TINY["hidden_size"])
    assert read_json(result / "config.json")["vocab_size"] == 700
    same = [(new.vocab[token], old.vocab[token]) for token in new.vocab if token in old.vocab]
    assert len(same) > 300
    ours, theirs = np.array(same).T
    torch.testing.assert_close(rows[ours], old_rows[theirs], rtol=0, atol=0)
    torch.testing.assert_close(bias[ours], old_bias[theirs], rtol=0, atol=0)
    assert transformers.AutoTokenizer.from_pretrained(result)("The zygotic house")["input_ids"][
        1:-1
    ] == new.encode("The zygotic house")


@pytest.mark.parametrize("tokenizer", ["wordpiece", "bpe"])
def test_a_new_vocabulary_for_roberta_moves_its_positions_with_the_padding_token(
    tokenizer, model, tmp_path, capsys
):
    source = model("roberta")
    result = (
        change(tmp_path, "--replace", source, "--vocab-size", 700, "--tokenizer", tokenizer)
        / "roberta-out"
    )
    ours = load_pretrained(MODELS[RobertaConfig]["masked_lm"], result).eval()
    models = [
        transformers.AutoModelForMaskedLM.from_pretrained(path).eval() for path in (source, result)
    ]
    with torch.no_grad():
        for loaded in models:
            loaded.get_input_embeddings().weight[10:15] = torch.arange(160.0).view(5, 32) / 99
        ours.word_embeddings.weight[10:15] = torch.arange(160.0).view(5, 32) / 99
        ids = torch.arange(10, 15)[None]
        outputs = [loaded.roberta(ids).last_hidden_state for loaded in models]
        outputs.append(ours.roberta(ids).last_hidden_state)
    assert ours.config.max_length == 62 and models[1].config.pad_token_id == 0
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    peer = transformers.AutoTokenizer.from_pretrained(result)
    new = load_tokenizer(find_tokenizer(result))
    assert peer(LINES[0], add_special_tokens=False)["input_ids"] == new.encode(LINES[0])
    assert models[1](**peer("The first", "the second", return_tensors="pt")).logits.isfinite().all()
    kept = int(
        re.search(r"([\d,]+) tokens with their old rows", capsys.readouterr().out)[1].replace(
            ",", ""
        )
    )
    assert kept > 100  # also those that the two tokenizers spell in two ways


def test_the_files_of_sentence_transformers_come_along(model, tmp_path):
    source = model("wordpiece")
    settings = EmbeddingSettings("first", True, {"query": "q: "}, max_seq_length=40)
    for name, content in settings.files(TINY["hidden_size"], 40).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    result = change(tmp_path, "--extend", source, "--add", 20) / "wordpiece-out"
    assert EmbeddingSettings.read(result) == settings
    package = pytest.importorskip("sentence_transformers")
    before, after = (
        package.SentenceTransformer(str(path), device="cpu") for path in (source, result)
    )
    assert after.max_seq_length == before.max_seq_length == 40
    np.testing.assert_allclose(
        *(encoder.encode(["the cat"], prompt_name="query") for encoder in (before, after)),
        atol=1e-6,
    )


def test_all_makes_samples_with_the_words_that_it_added(model, tmp_path):
    source = model("wordpiece")
    text = "\n\n".join(LINES)
    (tmp_path / "new.txt").write_text(text)
    words = ["all", "corpus", tmp_path / "new.txt", "--empty-line", "document", "--num-workers", 1]
    words += ["--output-dir", tmp_path / "law", "--extend", source, "--add", 20]
    words += ["--dynamic-masking", "--no-nsp", "--pack-documents"]
    assert run_here([*words, "--lengths", 64], prepare.main).returncode == 0
    made = tmp_path / "law/vocab/wordpiece-law"
    samples = tmp_path / "law/hdf5/seq_64/training"
    assert (samples / "vocab.txt").read_bytes() == (made / "vocab.txt").read_bytes()
    tokenizer = load_tokenizer(made / "vocab.txt")
    with h5py.File(next(samples.glob("*.hdf5"))) as shard:
        ids = set(shard["input_ids"][:].ravel().tolist())
    assert {tokenizer.vocab[word] for word in NEW} <= ids
    # An edited card is no reason to make the vocabulary again.
    card = made / "README.md"
    card.write_text(card.read_text() + "edited")
    again = run_here([*words, "--lengths", 64], prepare.main)
    assert "vocabulary: up to date" in again.stdout and card.read_text().endswith("edited")


def test_tokens_of_a_part_are_not_called_those_of_the_text(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_vocabulary, "COUNTED_MB", 0)
    change(tmp_path, "--extend", model("wordpiece"), "--add", 20)
    out = capsys.readouterr().out
    assert "tokens of the first 0 MB before" in out
    assert "of the text before" not in out
