"""Makes tests/fixtures/checkpoints: small BERTs that Paddle wrote, with the logits that it computed.

The tests read these files and do not need the library. To make them again, in an environment of its own:

    python3 -m venv /tmp/fixtures && /tmp/fixtures/bin/pip install paddlepaddle
    /tmp/fixtures/bin/python tests/make_checkpoint_fixtures.py

Last made with paddlepaddle 3.3.1.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

FOLDER = Path(__file__).resolve().parent / "fixtures" / "checkpoints"
VOCAB, PADDED_VOCAB, HIDDEN, HEADS, LAYERS, INTERMEDIATE, POSITIONS = 101, 104, 16, 2, 2, 32, 24
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "type_vocab_size": 2,
    "vocab_size": VOCAB,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
random = np.random.default_rng(0)
LENGTHS = np.array([9, 12, 5])
INPUT_IDS = np.where(np.arange(12) < LENGTHS[:, None], random.integers(5, VOCAB, (3, 12)), 0)
TOKEN_TYPE_IDS = np.where(np.arange(12) < LENGTHS[:, None], np.arange(12) >= 4, 0).astype(np.int64)
MASK = (np.arange(12) < LENGTHS[:, None]).astype(np.int64)


# --- Paddle: the recipe's modules, whose order of construction names the parameters -----------------------------------


class BertEmbeddings(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(PADDED_VOCAB, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN)
        self.layer_norm = nn.LayerNorm(HIDDEN, epsilon=1e-12)

    def forward(self, ids, types):
        positions = self.position_embeddings(paddle.arange(INPUT_IDS.shape[1]))
        return self.layer_norm(self.word_embeddings(ids) + positions + self.token_type_embeddings(types))


class BertPooler(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        return nn.functional.tanh(self.dense(hidden[:, 0]))


class BertModel(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INTERMEDIATE, dropout=0.0, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.pooler = BertPooler()

    def forward(self, ids, types, mask):
        hidden = self.encoder(self.embeddings(ids, types), mask)
        return hidden, self.pooler(hidden)


class BertLMPredictionHead(nn.Layer):
    def __init__(self, embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(HIDDEN, HIDDEN)
        self.layer_norm = nn.LayerNorm(HIDDEN, epsilon=1e-12)
        self.decoder_weight = embedding
        self.decoder_bias = self.create_parameter(shape=[PADDED_VOCAB], dtype=embedding.dtype, is_bias=True)

    def forward(self, hidden):
        hidden = self.layer_norm(nn.functional.gelu(self.transform(hidden)))
        return paddle.matmul(hidden, self.decoder_weight, transpose_y=True) + self.decoder_bias


class BertPretrainingHeads(nn.Layer):
    def __init__(self, embedding) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(embedding)
        self.seq_relationship = nn.Linear(HIDDEN, 2)


class BertForPretraining(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel()
        self.cls = BertPretrainingHeads(self.bert.embeddings.word_embeddings.weight)

    def forward(self, *inputs):
        hidden, pooled = self.bert(*inputs)
        return self.cls.predictions(hidden), self.cls.seq_relationship(pooled)


class BertForQuestionAnswering(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel()
        self.classifier = nn.Linear(HIDDEN, 2)

    def forward(self, *inputs):
        return [self.classifier(self.bert(*inputs)[0])]


def random_values(model) -> dict[str, np.ndarray]:
    """Large values by structured name; tied parameters get one."""
    values: dict[str, np.ndarray] = {}
    by_name = {}
    for name, parameter in model.state_dict().items():
        if parameter.name not in by_name:
            by_name[parameter.name] = random.normal(0, 0.3, parameter.shape).astype(np.float32)
        values[name] = by_name[parameter.name]
    return values


def paddle_inputs() -> list:
    return [INPUT_IDS, TOKEN_TYPE_IDS, MASK[:, None, None, :]]


def write_paddle_static(prefix: str, model_class) -> list[np.ndarray]:
    """As the recipe saves: a static program's parameters, with paddle.static.save."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        arrays = dict(zip(("ids", "types", "mask"), paddle_inputs(), strict=True))
        inputs = [paddle.static.data(name, array.shape, "int64") for name, array in arrays.items()]
        model = model_class()
        logits = model(*inputs)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        values = random_values(model)
        state = {parameter.name: values[name] for name, parameter in model.state_dict().items()}
        paddle.static.set_program_state(main, state)
        paddle.static.save(main, str(FOLDER / "paddle" / prefix))
        result = executor.run(main, feed=arrays, fetch_list=list(logits))
    for path in (FOLDER / "paddle").glob(f"{prefix}.*"):
        if path.suffix != ".pdparams":
            path.unlink()
    paddle.disable_static()
    return result


def write_paddle_state_dict(prefix: str, model_class) -> list[np.ndarray]:
    model = model_class()
    model.set_state_dict(random_values(model))
    model.eval()
    paddle.save(model.state_dict(), str(FOLDER / "paddle" / f"{prefix}.pdparams"))
    return [logits.numpy() for logits in model(*map(paddle.to_tensor, paddle_inputs()))]


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "paddle").mkdir(parents=True)
    (FOLDER / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    words = [*SPECIAL, *(f"word{i}" for i in range(VOCAB - len(SPECIAL)))]
    (FOLDER / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    expected = {"input_ids": INPUT_IDS, "token_type_ids": TOKEN_TYPE_IDS, "attention_mask": MASK}
    expected["paddle_mlm"], expected["paddle_nsp"] = write_paddle_static("pretraining", BertForPretraining)
    [expected["paddle_squad"]] = write_paddle_static("squad", BertForQuestionAnswering)
    expected["state_dict_mlm"], expected["state_dict_nsp"] = write_paddle_state_dict("state_dict", BertForPretraining)
    np.savez_compressed(FOLDER / "expected.npz", **expected)


if __name__ == "__main__":
    main()
