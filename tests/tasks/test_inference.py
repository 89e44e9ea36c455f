"""inference.py on tiny models with each of the three heads, against transformers."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_FILE, assert_refused
from hugging_face import LARGE, bert_tokenizer, logits_of_transformers, save
from safetensors.torch import load_file, save_file
from small_runs import run_here
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import inference
from bert_recipe.utils.errors import UserError

PASSAGE = "In the year 1900 Anna lived in Paris, and worked there as a baker. Paris was cold."
QUESTION = "Where did Anna live?"
SEVERAL = "multi_label_classification"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    torch.manual_seed(0)
    labels = {
        "id2label": {0: "bad", 1: "good", 2: "so so"},
        "label2id": {"bad": 0, "good": 1, "so so": 2},
    }
    made = {
        "span": BertForQuestionAnswering(BertConfig(**LARGE)),
        "classes": BertForSequenceClassification(BertConfig(**LARGE, **labels)),
        "several": BertForSequenceClassification(
            BertConfig(**LARGE, num_labels=3, problem_type=SEVERAL)
        ),
        "one of several": BertForSequenceClassification(
            BertConfig(**LARGE, num_labels=1, problem_type=SEVERAL)
        ),
        "score": BertForSequenceClassification(BertConfig(**LARGE, num_labels=1)),
        "masks": BertForMaskedLM(BertConfig(**LARGE)),
        "none": BertModel(BertConfig(**LARGE)),
        "tokens": BertForTokenClassification(BertConfig(**LARGE)),
    }
    parent = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        save(model, parent / name)
    (parent / "no config").mkdir()
    (parent / "no config" / "model.safetensors").write_bytes(
        (parent / "classes" / "model.safetensors").read_bytes()
    )
    (parent / "ckpt_8601.pt").touch()
    return {name: parent / name for name in (*made, "no config", "ckpt_8601.pt")}


@pytest.fixture
def ask(models, capsys):
    """Runs inference.py and returns its output."""

    def run(model: str, *flags) -> str:
        words = ["--init-checkpoint", models[model], "--device", "cpu", *flags]
        assert inference.main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


def n_best(output: str) -> list[tuple[float, str]]:
    """The lines `  0.123  text`."""
    lines = [
        line.split(maxsplit=1) for line in output.splitlines() if line.startswith(("  0.", "  1."))
    ]
    return [(float(probability), text) for probability, text in lines]


def test_the_answer_is_that_of_the_whole_space_of_spans(ask, models):
    output = ask("span", "--question", QUESTION, "--context", PASSAGE, "--n-best-size", 20)
    encoding = bert_tokenizer()(QUESTION, PASSAGE, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoding.pop("offset_mapping")[0].tolist()
    tokens = [index for index, part in enumerate(encoding.sequence_ids(0)) if part == 1]
    with torch.no_grad():
        logits = BertForQuestionAnswering.from_pretrained(models["span"]).eval()(**encoding)
    start, end = logits.start_logits[0], logits.end_logits[0]
    spans = [
        (float(start[a] + end[b]), offsets[a][0], offsets[b][1])
        for a in tokens
        for b in tokens
        if 0 <= b - a < 30
    ]
    spans.sort(reverse=True)
    _, first, stop = spans[0]
    best = PASSAGE[first:stop]
    assert output.splitlines()[0] == f"answer       {best}"
    # The probability is the softmax over the 20 best, of different texts.
    best_scores = {}
    for score, a, b in spans:
        best_scores.setdefault(PASSAGE[a:b], score)
    kept = list(best_scores.values())[:20]
    probability = 1 / sum(math.exp(score - kept[0]) for score in kept)
    assert f"probability  {probability:.3f}" in output
    found = n_best(output)
    assert found[0] == (pytest.approx(probability, abs=6e-4), best)
    assert len(found) == 20


def test_flags_may_have_nvidias_names(ask, models):
    config, vocab = models["span"] / "config.json", models["span"] / "vocab.txt"
    nvidias = (
        "--vocab_file",
        vocab,
        "--config_file",
        config,
        "--max_seq_length",
        64,
        "--n_best_size",
        3,
    )
    expected = ask("span", "--question", QUESTION, "--context", PASSAGE, "--n-best-size", 3)
    assert ask("span", "--question", QUESTION, "--context", PASSAGE, *nvidias) == expected
    assert len(n_best(expected)) == 3


def test_a_question_may_have_no_answer(ask):
    flags = ("--question", QUESTION, "--context", PASSAGE, "--n-best-size", 500)
    none = "(the passage has no answer)"
    assert none in [text for _, text in n_best(ask("span", *flags, "--version_2_with_negative"))]
    assert none not in ask("span", *flags)


def test_a_long_passage_is_read_in_windows(ask):
    long = "word " * 400 + PASSAGE + " word" * 400
    lines = ask("span", "--question", QUESTION, "--context", long, "--doc-stride", 16).splitlines()
    assert lines[0].startswith("answer ")


@pytest.mark.parametrize("pair", [None, "another text"])
def test_a_text_gets_the_labels_of_transformers(ask, models, pair):
    flags = ("--text", "a gripping film") + (("--text-pair", pair) if pair else ())
    output = ask("classes", *flags)
    logits = logits_of_transformers(
        BertForSequenceClassification, models["classes"], "a gripping film", pair
    )
    probabilities = logits.softmax(0)
    expected = sorted(
        zip(probabilities.tolist(), ["bad", "good", "so so"], strict=True), reverse=True
    )
    assert output.splitlines()[:2] == [
        f"label        {expected[0][1]}",
        f"probability  {expected[0][0]:.3f}",
    ]
    assert [text for _, text in n_best(output)] == [label for _, label in expected]
    assert [probability for probability, _ in n_best(output)] == pytest.approx(
        [p for p, _ in expected], abs=6e-4
    )


def test_a_regression_model_gives_its_score(ask, models):
    expected = logits_of_transformers(
        BertForSequenceClassification, models["score"], "a film"
    ).item()
    word, score = ask("score", "--text", "a film").split()
    assert (word, float(score)) == ("score", pytest.approx(expected, abs=1e-4))
    _, rounded = ask("score", "--text", "a film", "--amp").split()
    assert float(rounded) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("model", ["several", "one of several"])
def test_a_model_of_several_labels_per_text_gives_each_its_own_probability(ask, models, model):
    logits = logits_of_transformers(BertForSequenceClassification, models[model], "a film")
    expected = logits.sigmoid().sort(descending=True)
    found = n_best(ask(model, "--text", "a film"))
    assert [probability for probability, _ in found] == pytest.approx(
        expected.values.tolist(), abs=6e-4
    )
    assert [label for _, label in found] == [
        f"LABEL_{index}" for index in expected.indices.tolist()
    ]


def test_the_casing_is_that_of_the_folder(ask, models, tmp_path):
    words = VOCAB_FILE.read_text(encoding="utf-8").replace("\nparis\n", "\nParis\n")
    folder = Path(shutil.copytree(models["classes"], tmp_path / "cased"))
    (folder / "vocab.txt").write_text(words, encoding="utf-8")
    models["cased"] = folder
    outputs = {}
    for do_lower_case in (False, True):
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": do_lower_case}))
        outputs[do_lower_case] = ask("cased", "--text", "Paris")
        assert (
            ask("cased", "--text", "Paris", "--vocab-file", folder / "vocab.txt")
            == outputs[do_lower_case]
        )
    assert outputs[False] != outputs[True]
    assert outputs[True] == ask("cased", "--text", "Paris", "--do-lower-case")


WHOLE_FILE = ["--input", "a.csv", "--output", "b.csv"]


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        (
            "classes",
            ["--question", "a", "--context", "b"],
            "has no effect on {model}, a BertForSequenceClassification",
        ),
        ("span", ["--text", "a"], "--text has no effect on {model}, a BertForQuestionAnswering"),
        ("masks", ["--fill-mask", "no mask"], "the text has no [MASK]"),
        ("masks", ["--fill-mask", "[MASK] " * 80], "at most 64 are possible"),
        ("none", ["--text", "a"], "has no head"),
        ("ckpt_8601.pt", ["--text", "a"], "make a model folder of it with convert_checkpoint.py"),
        ("classes", ["--text", " "], "--text is empty"),
        ("no config", ["--text", "a"], "has no config.json: copy it there, or give --config-file"),
        ("tokens", ["--text", "a"], "does not predict tags such as B-PER, but no classes"),
        (
            "classes",
            ["--text", "word " * 63],
            "the text has 65 tokens, and at most 64 are possible",
        ),
        (
            "classes",
            ["--text", "word " * 31, "--text-pair", "word " * 31],
            "the text has 65 tokens",
        ),
        (
            "span",
            ["--question", "word " * 30, "--context", "b"],
            "the question has 30 tokens, and at most 28",
        ),
        (
            "span",
            ["--question", "a"],
            "--question has no effect without --context",
        ),
        ("span", [], "nothing to predict: give --text, --question,"),
        ("span", ["--question", "?", "--context", " "], "the passage has no words"),
        ("span", ["--question", "a", "--context", "b", "--max-seq-length", "65"], "64 positions"),
        ("classes", ["--text", "a", "--max-seq-length", "7"], ">= 8, not 7"),
        ("classes", ["--input", "a.csv"], "--input has no effect without --output"),
        (
            "classes",
            ["--input", "a.csv", "--output", "b.csv"],
            "without --text-column or --question-column",
        ),
        (
            "classes",
            ["--text-column", "a", "--text", "b"],
            "--text-column has no effect without --input",
        ),
        (
            "span",
            [*WHOLE_FILE, "--question-column", "q", "--context-column", "c", "--embed"],
            "--embed has no effect",
        ),
        (
            "span",
            ["--bert_model", "bert-large-uncased", "--fp16"],
            "--bert-model is not a flag of this program",
        ),
        ("span", ["--no_gpu"], "use --device cpu"),
    ],
)
def test_what_a_model_cannot_do_is_refused_in_one_line(models, model, flags, says):
    words = ["--init-checkpoint", models[model], "--device", "cpu", *flags]
    assert_refused(run_here(words, inference.main), says.format(model=models[model]))


def test_damaged_weights_give_no_prediction(models, tmp_path):
    """Masked words; logits of other models are those of evaluation.predict, which run_squad.py's
    test damages.
    """
    shutil.copytree(models["masks"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"][3] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="the model's logits are not finite"):
        inference.main(
            ["--init-checkpoint", str(tmp_path), "--device", "cpu", "--fill-mask", "a [MASK]"]
        )


def test_control_characters_of_a_passage_do_not_reach_the_terminal(ask):
    output = ask("span", "--question", QUESTION, "--context", f"\x1b[31m{PASSAGE}\x1b]0;title\x07")
    assert "\x1b" not in output and "\x07" not in output


TOKENIZER_FILES = [
    (
        "tokenizer_config.json",
        {"tokenizer_class": "MyTokenizer"},
        "tokenizer_class is 'MyTokenizer'",
    ),
    ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars is False"),
    ("tokenizer_config.json", {"mask_token": "<mask>"}, "mask_token is '<mask>'"),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"10000": {"content": "covid19"}}},
        "10001 tokens, and vocab_size is 10000",
    ),
    ("added_tokens.json", {"covid19": 10000}, "10001 tokens, and vocab_size is 10000"),
    (
        "tokenizer.json",
        {"added_tokens": [{"id": 10000, "content": "covid19"}]},
        "is no complete tokenizer",
    ),
]


@pytest.mark.parametrize(("name", "content", "says"), TOKENIZER_FILES)
def test_tokenizers_that_make_other_tokens_are_refused(models, tmp_path, name, content, says):
    shutil.copytree(models["classes"], tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        inference.main(["--init-checkpoint", str(tmp_path), "--device", "cpu", "--text", "covid19"])
