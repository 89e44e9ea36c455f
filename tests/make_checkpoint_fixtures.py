"""Makes tests/fixtures/checkpoints: small BERTs that TensorFlow and Paddle wrote, with the logits that they computed.

The tests read these files and need neither library. To make them again, in an environment of its own:

    python3 -m venv /tmp/fixtures && /tmp/fixtures/bin/pip install tensorflow-cpu paddlepaddle
    /tmp/fixtures/bin/python tests/make_checkpoint_fixtures.py

Last made with tensorflow-cpu 2.21.0 and paddlepaddle 3.3.1.
"""

import json
import math
import os
import shutil
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import paddle
import tensorflow as tf  # after paddle: the other order ends in a segmentation fault
from paddle import nn

FOLDER = Path(__file__).resolve().parent / "fixtures" / "checkpoints"
VOCAB, PADDED_VOCAB, HIDDEN, HEADS, LAYERS, INTERMEDIATE, POSITIONS = 101, 104, 16, 2, 2, 32, 24
NUM_LABELS = 3
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


# --- TensorFlow: Google's variables, and the forward pass on them -----------------------------------------------------


class GoogleBert:
    """Google's BERT in a graph; makes its variables under Google's names, with large values."""

    def __init__(self) -> None:
        hidden = (
            tf.gather(self.variable("bert/embeddings/word_embeddings", VOCAB, HIDDEN), INPUT_IDS)
            + tf.gather(self.variable("bert/embeddings/token_type_embeddings", 2, HIDDEN), TOKEN_TYPE_IDS)
            + self.variable("bert/embeddings/position_embeddings", POSITIONS, HIDDEN)[: INPUT_IDS.shape[1]]
        )
        hidden = self.layer_norm("bert/embeddings", hidden)
        for layer in range(LAYERS):
            hidden = self.layer(f"bert/encoder/layer_{layer}", hidden)
        self.hidden = hidden
        self.pooled = tf.tanh(self.dense("bert/pooler/dense", hidden[:, 0], HIDDEN))

    def variable(self, name: str, *shape: int):
        return tf.compat.v1.get_variable(name, initializer=random.normal(0, 0.3, shape).astype(np.float32))

    def dense(self, name: str, inputs, size: int):
        kernel = self.variable(f"{name}/kernel", inputs.shape[-1], size)
        return tf.tensordot(inputs, kernel, 1) + self.variable(f"{name}/bias", size)

    def layer_norm(self, name: str, inputs):
        mean, variance = tf.nn.moments(inputs, -1, keepdims=True)
        gamma = self.variable(f"{name}/LayerNorm/gamma", HIDDEN)
        return (inputs - mean) / tf.sqrt(variance + 1e-12) * gamma + self.variable(f"{name}/LayerNorm/beta", HIDDEN)

    def layer(self, name: str, inputs):
        def heads(part: str):
            states = self.dense(f"{name}/attention/self/{part}", inputs, HIDDEN)
            return tf.transpose(tf.reshape(states, [*INPUT_IDS.shape, HEADS, HIDDEN // HEADS]), [0, 2, 1, 3])

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(HIDDEN // HEADS)
        probs = tf.nn.softmax(scores - 10000.0 * (1.0 - MASK[:, None, None, :].astype(np.float32)))
        context = tf.reshape(tf.transpose(tf.matmul(probs, value), [0, 2, 1, 3]), [*INPUT_IDS.shape, HIDDEN])
        attended = self.dense(f"{name}/attention/output/dense", context, HIDDEN)
        attended = self.layer_norm(f"{name}/attention/output", attended + inputs)
        inner = tf.nn.gelu(self.dense(f"{name}/intermediate/dense", attended, INTERMEDIATE))
        return self.layer_norm(f"{name}/output", self.dense(f"{name}/output/dense", inner, HIDDEN) + attended)

    def head(self, name: str, inputs, labels: int):
        """A linear layer whose matrix is [out, in], as Google's heads have it."""
        weights = self.variable(f"{name}output_weights", labels, HIDDEN)
        return tf.tensordot(inputs, weights, [[-1], [1]]) + self.variable(f"{name}output_bias", labels)

    def masked_token_logits(self):
        name = "cls/predictions/transform"
        hidden = self.layer_norm(name, tf.nn.gelu(self.dense(f"{name}/dense", self.hidden, HIDDEN)))
        with tf.compat.v1.variable_scope("", reuse=True):
            embedding = tf.compat.v1.get_variable("bert/embeddings/word_embeddings")
        return tf.tensordot(hidden, embedding, [[-1], [1]]) + self.variable("cls/predictions/output_bias", VOCAB)


def write_google(prefix: str, logits_of_model, with_optimizer: bool = False) -> list[np.ndarray]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        logits = logits_of_model(GoogleBert())
        if with_optimizer:
            for variable in tf.compat.v1.trainable_variables():
                for moment in ("adam_m", "adam_v"):
                    shape = variable.shape.as_list()
                    tf.compat.v1.get_variable(f"{variable.op.name}/{moment}", shape, trainable=False)
            tf.compat.v1.train.get_or_create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        saver.save(session, str(FOLDER / "google" / prefix), write_meta_graph=False, write_state=False)
        return session.run(logits)


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
    (FOLDER / "google").mkdir(parents=True)
    (FOLDER / "paddle").mkdir()
    (FOLDER / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    words = [*SPECIAL, *(f"word{i}" for i in range(VOCAB - len(SPECIAL)))]
    (FOLDER / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    expected = {"input_ids": INPUT_IDS, "token_type_ids": TOKEN_TYPE_IDS, "attention_mask": MASK}
    expected["google_mlm"], expected["google_nsp"] = write_google(
        "bert_model.ckpt",
        lambda bert: [bert.masked_token_logits(), bert.head("cls/seq_relationship/", bert.pooled, 2)],
        with_optimizer=True,
    )
    [expected["google_squad"]] = write_google("squad.ckpt", lambda bert: [bert.head("cls/squad/", bert.hidden, 2)])
    [expected["google_classifier"]] = write_google(
        "classifier.ckpt", lambda bert: [bert.head("", bert.pooled, NUM_LABELS)]
    )
    tf.train.Checkpoint(kernel=tf.Variable([1.0, 2.0])).write(str(FOLDER / "google" / "keras.ckpt"))
    expected["paddle_mlm"], expected["paddle_nsp"] = write_paddle_static("pretraining", BertForPretraining)
    [expected["paddle_squad"]] = write_paddle_static("squad", BertForQuestionAnswering)
    expected["state_dict_mlm"], expected["state_dict_nsp"] = write_paddle_state_dict("state_dict", BertForPretraining)
    np.savez_compressed(FOLDER / "expected.npz", **expected)


if __name__ == "__main__":
    main()
