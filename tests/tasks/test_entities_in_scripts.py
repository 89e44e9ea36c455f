"""Entities in texts of several scripts: learnt from spans of characters, found in bare texts.
Expected spans are written by hand.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from conftest import TINY, read_json, read_json_lines, write_json_lines
from tokenizers import decoders, models, pre_tokenizers, trainers

import inference
import run_ner

PER, LOC = "PER", "LOC"
# Texts with their entities, in order; endings, particles and articles stand next to them.
TEXTS = [
    ("张伟下周要飞北京旅游", [(0, 2, PER), (6, 8, LOC)]),
    ("李娜在上海大学读书。", [(0, 2, PER), (3, 5, LOC)]),
    ("田中さんは東京タワーへ行く", [(0, 2, PER), (5, 10, LOC)]),
    ("마리아가 부산에 산다", [(0, 3, PER), (5, 7, LOC)]),
    ("김철수는 서울에서 일한다.", [(0, 3, PER), (5, 7, LOC)]),
    ("राम दिल्ली में रहता है।", [(0, 3, PER), (4, 10, LOC)]),
    ("सीता ने मुंबई देखी", [(0, 4, PER), (8, 13, LOC)]),
    ("สมชายไปกรุงเทพเมื่อวาน", [(0, 5, PER), (7, 14, LOC)]),
    ("คุณมานีอยู่ที่น้ำพอง", [(3, 7, PER), (14, 20, LOC)]),
    ("محمد يعيش في القاهرة الآن", [(0, 4, PER), (13, 20, LOC)]),
    ("سافرت مَريَم إلى وبغداد", [(6, 12, PER), (18, 23, LOC)]),
    ("😀👨‍👩‍👧 Zoë's friend saw São Paulo.", [(7, 10, PER), (24, 33, LOC)]),
]


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece(folder: Path) -> Path:
    characters = sorted({character for text, _ in TEXTS for character in text if character.strip()})
    tokens = [*SPECIAL, *characters]
    tokens += [f"##{character}" for character in characters]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    return folder / "vocab.txt"


def byte_level(folder: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text, _ in TEXTS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def unigram(folder: Path) -> Path:
    """Characters and beginnings of words: a trained vocabulary differs from training to
    training.
    """
    words = [f"▁{word}" for text, _ in TEXTS for word in text.split()]
    counts = Counter(character for word in words for character in word)
    counts.update(word[:2] for word in words)
    total = counts.total()
    pieces = [(token, 0.0) for token in SPECIAL]
    pieces += [(piece, math.log(count / total)) for piece, count in counts.items()]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("make", [wordpiece, byte_level, unigram])
def test_entities_that_were_learnt_from_spans_are_found_in_bare_texts(make, tmp_path):
    vocab = make(tmp_path)
    size = len(read_json(vocab)["model"]["vocab"]) if vocab.suffix == ".json" else 0
    size = size or len(vocab.read_text().splitlines())
    config = {**TINY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config |= {"vocab_size": size, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = [
        {
            "text": text,
            "spans": [{"start": a, "end": b, "label": kind} for a, b, kind in spans],
        }
        for text, spans in TEXTS
    ]
    write_json_lines(tmp_path / "train.jsonl", rows)
    write_json_lines(tmp_path / "dev.jsonl", rows[::-1])
    words = ["--config-file", tmp_path / "config.json", "--vocab-file", vocab]
    words += ["--output-dir", tmp_path / "out", "--device", "cpu", "--do-train", "--do-eval"]
    words += ["--train-file", tmp_path / "train.jsonl", "--eval-file", tmp_path / "dev.jsonl"]
    words += ["--max-seq-length", 100, "--epochs", 75, "--train-batch-size", 4]
    assert run_ner.main([str(word) for word in [*words, "--learning-rate", "0.005"]]) == 0
    (folder,) = tmp_path.glob("out/*/ner")
    assert read_json(folder / "scores.json")["f1"] == 1

    write_json_lines(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in rows])
    words = ["--init-checkpoint", folder, "--device", "cpu", "--text-column", "text"]
    words += ["--input", tmp_path / "bare.jsonl", "--output", tmp_path / "found.jsonl"]
    assert inference.main([str(word) for word in words]) == 0
    predicted = read_json_lines(tmp_path / "found.jsonl")
    assert predicted == rows
