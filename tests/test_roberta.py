"""RoBERTa, XLM-RoBERTa and CamemBERT: logits, gradients and folders are those of transformers, and every program works
with them, with byte-level BPE and Unigram tokenizers."""

import json

import pytest
import torch
import transformers
from conftest import ROOT, TINY, assert_refused
from safetensors.torch import save_file
from small_runs import run_here, steps_folder, train
from test_hugging_face_tokenizers import TEXT, file_of, ours
from test_modeling import relative_error
from test_modernbert import SMALL, logits_of, make_input

import create_pretraining_data
import inference
import run_glue
import run_squad
from checkpoint.weights import load_pretrained
from encoders.modernbert import ModernBertConfig
from encoders.roberta import RobertaConfig
from modeling import MODELS, config_from_dict, make_model
from utils.errors import UserError

FAMILY = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
HEADS = {
    "masked_lm": "MaskedLM",
    "question_answering": "QuestionAnswering",
    "sequence_classification": "SequenceClassification",
    "token_classification": "TokenClassification",
}
VALUES = {
    **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{"intermediate_size": 48, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1},
}
CASES = [("roberta", head) for head in HEADS] + [(kind, "sequence_classification") for kind in FAMILY if "-" in kind]
CASES += [("xlm-roberta", "masked_lm"), ("camembert", "masked_lm"), ("camembert", "token_classification")]


def make_pair(kind: str, head: str, **changes):
    """A model of this project with large weights, and transformers' with the same weights."""
    torch.manual_seed(0)
    values = {**VALUES, **changes, "model_type": kind}
    model = make_model(head, config_from_dict(values))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (1 if "orm.weight" in name else 0))
        model.word_embeddings.weight[values["vocab_size"] :] = 0
    config = getattr(transformers, f"{FAMILY[kind]}Config")(**values, num_labels=2)
    twin = getattr(transformers, f"{FAMILY[kind]}For{HEADS[head]}")(config)
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all("lm_head.decoder" in name for name in missing)
    twin.tie_weights()
    return model, twin


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_logits_and_gradients_agree_with_transformers(kind, head):
    model, twin = make_pair(kind, head)
    stream, padded, real = make_input()
    padded["input_ids"] = padded["input_ids"].masked_fill(~real, 1)
    theirs = logits_of(twin(**padded))
    theirs = theirs if head == "sequence_classification" else theirs[real]
    torch.manual_seed(2)
    weights = torch.randn_like(theirs)
    (theirs * weights).sum().backward()
    gradients = {name: p.grad for name, p in twin.named_parameters(remove_duplicate=False)}
    for form in ("stream", "padded"):
        model.zero_grad()
        found = logits_of(model(stream) if form == "stream" else model(**padded))
        found = found[real] if form == "padded" and head != "sequence_classification" else found
        assert relative_error(found, theirs) < 1e-5, form
        (found * weights).sum().backward()
        for name, p in model.named_parameters():
            gradient = p.grad[: len(gradients[name])]
            if not name.endswith("key.bias"):  # zero but for rounding
                assert relative_error(gradient, gradients[name]) < 1e-5, (form, name)


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_folders_have_the_same_logits_here_and_in_transformers(tmp_path, kind, head):
    model, twin = make_pair(kind, head, classifier_dropout=0.3)
    _, padded, real = make_input()
    padded["input_ids"] = padded["input_ids"].masked_fill(~real, 1)
    expected = logits_of(twin.eval()(**padded))
    rows = ... if head == "sequence_classification" else real
    twin.save_pretrained(tmp_path / "theirs")
    loaded = load_pretrained(MODELS[RobertaConfig][head], tmp_path / "theirs").eval()
    assert relative_error(logits_of(loaded(**padded))[rows], expected[rows]) < 1e-5
    assert loaded.config.head_dropout == 0.3 and loaded.config.max_length == 512
    ours = tmp_path / "ours"
    ours.mkdir()
    save_file(model.state_dict(), ours / "model.safetensors", metadata={"format": "pt"})
    assert model.architecture == f"{FAMILY[kind]}For{HEADS[head]}"
    (ours / "config.json").write_text(json.dumps({"architectures": [model.architecture], **model.config.to_dict()}))
    auto = getattr(transformers, "AutoModelForMaskedLM" if head == "masked_lm" else f"AutoModelFor{HEADS[head]}")
    back = auto.from_pretrained(ours).eval()
    assert type(back).__name__ == model.architecture and back.config.classifier_dropout == 0.3
    assert relative_error(logits_of(back(**padded))[rows], expected[rows]) < 1e-6


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("config_class", MODELS)
def test_logits_of_classifiers_and_spans_are_float32_with_16_bit_products(config_class, prepared):
    values = {RobertaConfig: VALUES, ModernBertConfig: SMALL}.get(
        config_class, {**TINY, "max_position_embeddings": 512}
    )
    for head in ("question_answering", "sequence_classification", "token_classification"):
        torch.manual_seed(0)
        model = make_model(head, config_class.from_dict(values)).eval()
        with torch.no_grad():
            expected = logits_of(model(make_input()[0]))
            if prepared:
                model.prepare_for_inference(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                found = logits_of(model(make_input()[0]))
        assert found.dtype == torch.float32 and 0 < relative_error(found, expected) < 0.02


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"pad_token_id": None}, "pad_token_id is None"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        RobertaConfig.from_dict({**VALUES, **change})


@pytest.fixture(scope="module", params=["roberta", "xlm-r"])
def pretrained(request, inputs, tmp_path_factory):
    """A checkpoint of two updates, from text."""
    output, kind = tmp_path_factory.mktemp("pretrained"), request.param
    books = output / "books.txt"
    books.write_text("\n".join(line.strip() + "\n" * (n % 20 == 19) for n, line in enumerate(TEXT) if line.strip()))
    shared = ("--vocab-file", file_of(kind), "--max-seq-length", 32)
    made = ("--input-file", books, "--output-dir", output / "shards", "--num-workers", 1, *shared, "--no-nsp")
    create_pretraining_data.main([str(word) for word in (*made, "--max-predictions-per-seq", 5)])
    kind = {"xlm-r": "xlm-roberta"}.get(kind, kind)
    config = {**TINY, "vocab_size": ours(request.param).vocab_size, "model_type": kind, "pad_token_id": 1}
    (output / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 130, "type_vocab_size": 1}))
    shards = ("--input-dir", output / "shards", "--config-file", output / "config.json", *shared)
    command = inputs.command(output, *shards, "--max-predictions-per-seq", 5, "--max-steps", 2)
    train(command)
    return steps_folder(output) / "2", kind, command


def test_programs_pre_train_fine_tune_and_predict(pretrained, tmp_path, capsys):
    folder, kind, _ = pretrained
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert type(model).__name__ == f"{FAMILY[kind]}ForMaskedLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 128 and tokenizer("a", "b")["input_ids"].count(tokenizer.sep_token_id) == 3
    device, mask = ("--device", "cpu"), tokenizer.mask_token
    assert inference.main(["--init-checkpoint", str(folder), "--fill-mask", f"the {mask} is", *device]) == 0
    shared = ["--init-checkpoint", str(folder), "--output-dir", str(tmp_path), "--do-train", *device]
    shared += ["--max-steps", "1", "--max-seq-length", "128", "--report-file", str(tmp_path / "report.json")]

    (tmp_path / "texts.csv").write_text("text,label\n" + "good,one\nbad,two\n" * 8)
    texts = ("--train-file", str(tmp_path / "texts.csv"), "--text-column", "text", "--label-column", "label")
    assert run_glue.main([*shared, *texts]) == 0
    rows = [{"text": "good bad", "labels": ["one", "two"]}, {"text": "bad", "labels": []}] * 4
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    many = ("--train-file", str(tmp_path / "many.jsonl"), "--text-column", "text", "--label-column", "labels")
    assert run_glue.main([*shared, *many, "--task-name", "multi-label", "--output-dir", str(tmp_path / "many")]) == 0
    rows = [{"text": "Anna saw Zo\u00e9.", "spans": [{"start": 0, "end": 4, "label": "PER"}]}] * 4
    (tmp_path / "tags.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_glue.main([*shared, "--task-name", "ner", "--train-file", str(tmp_path / "tags.jsonl")]) == 0
    squad = ("--train-file", str(ROOT / "data" / "sample" / "squad" / "train-v1.1.json"), "--max-query-length", "32")
    assert run_squad.main([*shared, *squad]) == 0

    capsys.readouterr()
    for found, asked in {
        tmp_path / "custom" / "classification": ("--text", "good"),
        tmp_path / "many" / "custom" / "multi-label": ("--text", "good"),
        tmp_path / "custom" / "ner": ("--text", "Anna saw"),
        tmp_path / "custom" / "squad": ("--question", "Who?", "--context", "Anna lived in Paris."),
    }.items():
        found = found if found.is_dir() else next(path for path in found.parent.iterdir() if path.is_dir())
        assert inference.main(["--init-checkpoint", str(found), *asked, *device]) == 0, found
    files = ("--input", str(tmp_path / "texts.csv"), "--output", str(tmp_path / "vectors.npy"), "--text-column", "text")
    assert inference.main(["--init-checkpoint", str(folder), "--embed", *files, *device]) == 0


def test_what_does_not_fit_roberta_is_refused(pretrained, tmp_path):
    folder, _, command = pretrained
    refused = run_here([*command, "--output-dir", str(tmp_path), "--pre-layer-norm"])
    assert_refused(refused, "--pre-layer-norm is not for", "roberta")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "pad_token_id": 0}))
    refused = run_here([*command, "--output-dir", str(tmp_path), "--config-file", str(config)])
    assert_refused(refused, "pad_token_id is 0, and the tokenizer's is 1")
    with pytest.raises(UserError, match="128 positions"):
        inference.main(["--init-checkpoint", str(folder), "--fill-mask", "a", "--max-seq-length", "129"])
