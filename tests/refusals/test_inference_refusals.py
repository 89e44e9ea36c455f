"""What inference.py refuses, before the first prediction."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from hugging_face import LARGE, save
from refusal_tables import Refusal, refusals
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import inference
from bert_recipe.tasks.classification import task

CLASSES, SPAN, MASKS = (f"--init-checkpoint {{{name}}}" for name in ("classes", "span", "masks"))
WHOLE_FILE = "--input {folder}/a.csv --output {folder}/out.csv --text-column review"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A folder for each kind of model, and what is none."""
    torch.manual_seed(0)
    kinds = {
        "span": BertForQuestionAnswering,
        "classes": BertForSequenceClassification,
        "masks": BertForMaskedLM,
        "none": BertModel,
        "tokens": BertForTokenClassification,
    }
    parent = tmp_path_factory.mktemp("models")
    for name, kind in kinds.items():
        save(kind(BertConfig(**LARGE)), parent / name)
    single_texts = BertConfig(**LARGE, text_pairs=False)
    save(BertForSequenceClassification(single_texts), parent / "single")
    shutil.copytree(parent / "classes", parent / "bare")
    (parent / "bare" / "config.json").unlink()
    (parent / "ckpt_8601.pt").touch()
    shutil.copytree(parent / "masks", parent / "nan")
    tensors = load_file(parent / "nan" / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"][3] = math.nan
    save_file(tensors, parent / "nan" / "model.safetensors", metadata={"format": "pt"})
    return {path.stem: path for path in parent.iterdir()}


COMMAND_LINES = [
    (f"{SPAN} --question a", "--question has no effect without --context"),
    (f"{CLASSES} --text a --max-seq-length 7", ">= 8, not 7"),
    (f"{CLASSES} --input a.csv", "--input has no effect without --output"),
    (
        f"{CLASSES} --input a.csv --output b.csv",
        "without --text-column or --question-column",
    ),
    (f"{CLASSES} --text-column a --text b", "--text-column has no effect without --input"),
    (f"{SPAN} --bert_model bert-large-uncased", "--bert-model is not a flag of this program"),
    (f"{SPAN} --no_gpu", "use --device cpu"),
]
MODELS = [
    (
        f"{CLASSES} --question a --context b",
        "has no effect on {classes}, a BertForSequenceClassification",
    ),
    (f"{SPAN} --text a", "--text has no effect on {span}, a BertForQuestionAnswering"),
    (
        f"{SPAN} --input a --output b --question-column q --context-column c --embed",
        "--embed has no effect",
    ),
    ("--init-checkpoint {none} --text a", "has no head"),
    (
        "--init-checkpoint {ckpt_8601} --text a",
        "make a model folder of it with convert_checkpoint.py",
    ),
    (
        "--init-checkpoint {bare} --text a",
        "has no config.json: copy it there, or give --config-file",
    ),
    (
        "--init-checkpoint {tokens} --text a",
        "does not predict tags such as B-PER, but no classes",
    ),
    # Logits of other models are those of evaluation.predict, as in run_squad.py's table.
    (
        ("--init-checkpoint", "{nan}", "--fill-mask", "a [MASK]"),
        "the model's logits are not finite",
    ),
]
TEXTS = [
    (SPAN, "nothing to predict: give --text, --question,"),
    (f"{MASKS} --fill-mask a", "the text has no [MASK]"),
    ((*MASKS.split(), "--fill-mask", "[MASK] " * 80), "at most 64 are possible"),
    ((*CLASSES.split(), "--text", " "), "--text is empty"),
    ((*SPAN.split(), "--question", "?", "--context", " "), "the passage has no words"),
    (f"{SPAN} --question a --context b --max-seq-length 65", "64 positions"),
]
FILES = [
    (
        f"{CLASSES} {WHOLE_FILE} --output {{folder}}/out.txt",
        "unknown file extension",
        {"a.csv": "review\na\n"},
    ),
    (
        f"{CLASSES} {WHOLE_FILE} --output {{folder}}/out.npy",
        "unknown file extension",
        {"a.csv": "review\na\n"},
    ),
    (
        f"{CLASSES} {WHOLE_FILE} --output {{folder}}/b.csv",
        "is a folder: give the name of a file",
        {"a.csv": "review\na\n", "b.csv/a": ""},
    ),
    (
        f"{CLASSES} {WHOLE_FILE} --output {{folder}}/a.csv",
        "is the file to predict",
        {"a.csv": "review\na\n"},
    ),
    (f"{CLASSES} {WHOLE_FILE}", "no column 'review'", {"a.csv": "text\na\n"}),
    (f"{CLASSES} {WHOLE_FILE}", "has no rows", {"a.csv": "review\n"}),
    (
        f"{CLASSES} {WHOLE_FILE}",
        "two columns 'id': rename one",
        {"a.csv": "id,id,review\n1,2,a\n"},
    ),
    (
        f"{CLASSES} {WHOLE_FILE} --truncate false",
        "--truncate cannot be switched off: long texts are always cut",
        {"a.csv": "review\na\n"},
    ),
    (
        f"--init-checkpoint {{single}} {WHOLE_FILE} --pair-column x",
        "was fine-tuned on single texts: leave out",
        {"a.csv": "review,x\na,b\n"},
    ),
    *(
        (f"{CLASSES} {WHOLE_FILE} --input {{folder}}/a.jsonl {flags}", says, {"a.jsonl": rows})
        for flags, says, rows in (
            ("", ":1: half of a surrogate pair", '{"review": "a", "x": "\\ud800"}'),
            ("", ":1: 'review' is 3, expected a string", '{"review": 3}'),
            (
                "--output {folder}/o.parquet",
                "cannot store",
                '{"review": "a", "x": 1}\n{"review": "b", "x": "1"}',
            ),
        )
    ),
]
# A file beside those of a model.
FOLDERS = [
    *(
        ("--init-checkpoint {folder}/classes --text covid19", says, {f"classes/{name}": content})
        for name, content, says in (
            (
                "tokenizer_config.json",
                {"tokenizer_class": "MyTokenizer"},
                "tokenizer_class is 'MyTokenizer'",
            ),
            (
                "tokenizer_config.json",
                {"tokenize_chinese_chars": False},
                "tokenize_chinese_chars is False",
            ),
            ("tokenizer_config.json", {"mask_token": "<mask>"}, "mask_token is '<mask>'"),
            (
                "tokenizer_config.json",
                {"added_tokens_decoder": {"10000": {"content": "covid19"}}},
                "10001 tokens, and vocab_size is 10000",
            ),
            (
                "added_tokens.json",
                {"covid19": 10000},
                "10001 tokens, and vocab_size is 10000",
            ),
            (
                "tokenizer.json",
                {"added_tokens": [{"id": 10000, "content": "covid19"}]},
                "is no complete tokenizer",
            ),
        )
    ),
    *(
        (
            f"--init-checkpoint {{folder}}/none {WHOLE_FILE} --output {{folder}}/o.npy --embed",
            name,
            {"a.csv": "review\na\n", f"none/{name}": content},
        )
        for name, content in (
            ("sentence_bert_config.json", {"max_seq_length": "256"}),
            ("sentence_bert_config.json", {"do_lower_case": [1]}),
            ("modules.json", {"type": "Pooling"}),
            ("modules.json", [5]),
            ("modules.json", [{"type": "Pooling"}]),
        )
    ),
]


@pytest.fixture(autouse=True)
def _predicts_nothing(monkeypatch):
    monkeypatch.setattr(task, "class_predictions", pytest.fail)


@refusals(*COMMAND_LINES, *MODELS, *TEXTS, *FILES)
def test_inference_refuses(refusal: Refusal, places, tmp_path):
    if "parquet" in refusal.flags:
        pytest.importorskip("pyarrow")
    refusal.check(inference.main, ["--device", "cpu"], tmp_path, **places)


@refusals(*FOLDERS)
def test_inference_refuses_a_folder_with(refusal: Refusal, places, tmp_path):
    for name in ("classes", "none"):
        shutil.copytree(places[name], tmp_path / name)
    refusal.check(inference.main, ["--device", "cpu"], tmp_path)
