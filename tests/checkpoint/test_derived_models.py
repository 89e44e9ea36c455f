"""convert_checkpoint.py average and safetensors: the folders load here and in
transformers.
"""

import json

import pytest
import tokenizers
import torch
import transformers
from checkpoint_files import convert_with
from conftest import read_json
from safetensors.torch import load_file

import convert_checkpoint
from bert_recipe.checkpoint.calibration import read_temperature, write_temperature
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.utils.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(45))]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
MODERN = {
    **SIZES,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "max_position_embeddings": 64,
}
MODERN |= {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}


def save(folder, kind: str, seed: int = 0, **changes):
    """A folder of transformers with random weights."""
    torch.manual_seed(seed)
    config_class, model_class = (
        getattr(transformers, kind + end) for end in ("Config", "ForMaskedLM")
    )
    base = (
        MODERN
        if kind == "ModernBert"
        else {**SIZES, "max_position_embeddings": 12, "pad_token_id": 0}
    )
    model = model_class(config_class(**{**base, **changes})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 10}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("kind", ["Bert", "ModernBert"])
def test_average_is_that_of_each_weight(tmp_path, kind):
    models = [save(tmp_path / str(seed), kind, seed) for seed in range(3)]
    write_temperature(tmp_path / "0", 1.5, 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "2").rename(tmp_path / "run" / "best")
    done = convert_with(
        "average", tmp_path / "0", tmp_path / "1", tmp_path / "run", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert read_temperature(tmp_path / "out") == 1  # that of one model is not the average's
    settings = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert settings["model_max_length"] == 10  # as in training
    assert f"{tmp_path / 'run'}: using best, the model with the best score" in done.stdout
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    states = [model.state_dict() for model in models]
    for name, average in loaded.state_dict().items():
        expected = sum(state[name].double() for state in states) / 3
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-7)


def test_models_of_sentence_embeddings_keep_their_pooling(tmp_path):
    settings = EmbeddingSettings("first", True, {"query": "find: "})
    for seed, folder in enumerate(("in", "other")):
        save(tmp_path / folder, "Bert", seed)
        for name, content in settings.files(16, 10).items():
            (tmp_path / folder / name).parent.mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
    done = convert_with("average", tmp_path / "in", tmp_path / "other", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    stored = EmbeddingSettings.read(tmp_path / "out")
    assert (stored.pooling, stored.normalize, stored.prompts) == (
        "first",
        True,
        {"query": "find: "},
    )


def pickle_weights(folder, **changes) -> None:
    """Replaces model.safetensors by what older versions of transformers wrote."""
    tensors = load_file(folder / "model.safetensors") | changes
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_safetensors_keeps_the_logits_of_a_pickled_model(tmp_path, is_sharded):
    theirs = save(tmp_path / "in", "Bert")
    position_ids = torch.arange(12)[None]  # a buffer that older versions saved
    pickle_weights(tmp_path / "in", **{"bert.embeddings.position_ids": position_ids})
    if is_sharded:
        tensors = torch.load(tmp_path / "in" / "pytorch_model.bin", weights_only=True)
        (tmp_path / "in" / "pytorch_model.bin").unlink()
        weight_map = {name: f"part-{n % 2}.bin" for n, name in enumerate(tensors)}
        for part in ("part-0.bin", "part-1.bin"):
            own = {name: tensors[name] for name in tensors if weight_map[name] == part}
            torch.save(own, tmp_path / "in" / part)
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "in" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    write_temperature(tmp_path / "in", 1.5, 100)
    done = convert_with("safetensors", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert read_temperature(tmp_path / "out") == 1.5
    ours = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[2, 7, 9, 3]])
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert (tmp_path / "out" / "vocab.txt").read_text() == "\n".join(WORDS) + "\n"


def test_models_of_one_vocabulary_and_two_casings_have_no_average(tmp_path):
    """Also where the tokenizer.json alone says the casing."""
    for name, lowercase in (("a", True), ("b", False)):
        save(tmp_path / name, "Bert")
        made = tokenizers.BertWordPieceTokenizer(
            str(tmp_path / name / "vocab.txt"), lowercase=lowercase, strip_accents=None
        )
        made.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "vocab.txt").unlink()
        declared = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(UserError, match="has another casing than"):
        convert_checkpoint.main(["average", *(str(tmp_path / name) for name in "abc")])
