"""A pre-training objective with another denominator and a second model, which no trainer knows:
replaced-token detection (Clark et al., 2020), whose loss is a mean over all tokens.

Legend: T tokens of the stream, M masked tokens.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NO_DROPOUT, TINY, VOCAB_FILE
from safetensors.torch import load_file
from small_runs import InMemoryDataset
from torch import Tensor

from bert_recipe.checkpoint.identity import identity_of
from bert_recipe.checkpoint.progress import first_difference
from bert_recipe.config import (
    LoaderConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StartConfig,
    TrainerConfig,
)
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.attention import COMPILED_ON_CPU
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    BertModel,
)
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.model.token_stream import BatchCounts, MicroBatch, TokenStream
from bert_recipe.parallel.parallelize import parallelize
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.training.evaluation import evaluate
from bert_recipe.training.library import OwnTask, make_settings, make_trainer, train
from bert_recipe.training.memory_estimate import MemorySettings, estimate_memory, num_parameters
from bert_recipe.utils.distributed import DistributedContext

CONFIG = BertConfig(**{**TINY, "vocab_size": 200, **NO_DROPOUT}, labels=("replaced",))
LENGTHS = (32, 32, 19, 8)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReplacedTokens(PretrainingTask):
    """The frozen generator fills in the masked tokens; the model says which are not the text's."""

    generator: PreTrainedModel | None = None

    head = "token_classification"

    @property
    def frozen_models(self) -> tuple[PreTrainedModel, ...]:
        return (self.generator,)

    def identity(self) -> dict[str, str]:
        return {"generator": f"{self.generator.word_embeddings.weight.detach().sum():.6f}"}

    def objective(self, model: PreTrainedModel, micro_batch: MicroBatch) -> dict[str, Tensor]:
        stream = TokenStream.from_batch(micro_batch, self.max_seq_length)
        positions_M = micro_batch["mlm_positions"]
        with torch.no_grad():
            logits_MV = self.generator(stream, mlm_positions=positions_M).prediction_logits
        filled_T = stream.input_ids.index_copy(0, positions_M, logits_MV.argmax(dim=1))
        text_T = stream.input_ids.index_copy(0, positions_M, micro_batch["mlm_labels"])
        logits_T = model(stream._replace(input_ids=filled_T)).logits[:, 0]
        is_replaced_T = (filled_T != text_T).float()
        loss = F.binary_cross_entropy_with_logits(logits_T, is_replaced_T, reduction="sum")
        return {"loss": loss, "replaced": is_replaced_T.sum()}

    def loss(self, sums: dict[str, Tensor], counts: BatchCounts) -> Tensor:
        return sums["loss"] / counts.tokens

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        replaced = sums["replaced"] / counts.labelled_tokens
        return {"loss": self.loss(sums, counts), "replaced": replaced}


def make_task(seed: int = 1) -> ReplacedTokens:
    torch.manual_seed(seed)
    return ReplacedTokens(max_seq_length=32, generator=BertForMaskedLM(CONFIG))


def discriminator() -> PreTrainedModel:
    torch.manual_seed(0)
    return make_model("token_classification", CONFIG)


def mean_over_tokens(task: ReplacedTokens, dataset: InMemoryDataset) -> tuple[Tensor, dict]:
    """The loss and its gradients, with a loop over the samples."""
    model = discriminator()
    losses = []
    for number in range(len(dataset)):
        stream = {
            name: torch.from_numpy(values)
            for name, values in dataset.stream(np.array([number])).items()
        }
        tokens = TokenStream.from_batch(stream, 32)
        logits = task.generator(tokens, mlm_positions=stream["mlm_positions"]).prediction_logits
        ids, labels = tokens.input_ids.clone(), torch.zeros(tokens.num_tokens)
        for position, label, row in zip(
            stream["mlm_positions"], stream["mlm_labels"], logits, strict=True
        ):
            ids[position] = row.argmax()
            labels[position] = float(row.argmax() != label)
        chances = model(tokens._replace(input_ids=ids)).logits[:, 0].sigmoid()
        losses += [*-torch.where(labels == 1, chances, 1 - chances).log()]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("batch_size", [4, 2])
def test_a_mean_over_all_tokens_and_a_second_model_need_no_other_trainer(batch_size):
    task, dataset = make_task(), InMemoryDataset(LENGTHS, 200)
    loader = LoaderConfig(batch_size, 4, 32, 4)
    settings = make_settings("unused", benchmark=True, max_steps=1, learning_rate=1e-4)
    trainer = make_trainer(discriminator(), task, dataset, settings, Runtime(CPU))
    limits = MicroBatchLimits.of(loader)
    batch = make_step_batch(dataset, np.arange(4), limits)
    assert len(batch.micro_batches) == 4 // batch_size
    stats = GlobalBatchStats.of(batch)
    loss = task.loss(trainer.training_step(batch, stats), stats.counts)
    expected, gradients = mean_over_tokens(make_task(), dataset)
    torch.testing.assert_close(loss, expected)
    for name, p in trainer.parallel.named_parameters().items():
        if gradients[name] is not None:  # the pooler has none
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert all(p.grad is None for p in task.generator.parameters())

    metrics = evaluate(trainer.parallel, task, dataset, limits, Runtime(CPU))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5) and metrics["replaced"] > 0


def test_what_a_signal_may_end_on_one_rank_of_an_evaluation_has_no_collective():
    """The other ranks would wait in it."""
    task, dataset = make_task(), InMemoryDataset(LENGTHS, 200)
    settings = make_settings("unused", benchmark=True, max_steps=1, learning_rate=1e-4)
    trainer = make_trainer(discriminator(), task, dataset, settings, Runtime(CPU))
    calls = []

    @contextlib.contextmanager
    def guard():
        calls.append("begin")
        yield
        calls.append("end")

    class Recorded(DistributedContext):
        def wait_for_device(self, device: torch.device) -> None:
            calls.append("wait")

        def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
            calls.append("sum")
            return list(values)

    limits = MicroBatchLimits.of(LoaderConfig(4, 4, 32, 4))
    runtime = Runtime(CPU, distributed=Recorded())
    evaluate(trainer.parallel, task, dataset, limits, runtime, guard=guard)
    assert calls == ["begin", "end", "wait", "sum"]


@pytest.mark.parametrize("compiled", ["model", "layers"])
def test_a_second_model_has_the_attention_and_the_compilation_of_the_run(compiled):
    """The first call compiles, so that nothing is compiled here."""
    task = make_task()
    options = ParallelConfig(compiled), Runtime(CPU)
    model = parallelize(discriminator(), *options, frozen_models=task.frozen_models).model
    for each in (model, task.generator):
        assert each.is_compiled
        assert each.base_model.attention_implementation == COMPILED_ON_CPU
        layers = [layer._compiled_call_impl is not None for layer in each.layers]
        assert layers == [compiled == "layers"] * len(layers)
    assert not any(p.requires_grad for p in task.generator.parameters())


def test_all_encoders_of_a_model_are_prepared():
    """Such as a generator that is trained with the discriminator."""
    model = discriminator()
    one_encoder = training_flops(model, LENGTHS, 4)
    model.generator = make_task().generator.bert
    assert model.encoders == [model.bert, model.generator]
    generator_flops = training_flops(model.generator, LENGTHS, 0)
    assert training_flops(model, LENGTHS, 4) == one_encoder + generator_flops
    prepared = parallelize(model, ParallelConfig("layers"), Runtime(CPU)).model
    assert all(layer._compiled_call_impl is not None for layer in prepared.generator.layers)
    implementations = {encoder.attention_implementation for encoder in prepared.encoders}
    assert implementations == {COMPILED_ON_CPU}


TOKENIZER = BertTokenizer(VOCAB_FILE)
PAIR_CONFIG = BertConfig(
    **{**TINY, "vocab_size": TOKENIZER.vocab_size, **NO_DROPOUT}, labels=("replaced",)
)


class Pair(BertForTokenClassification):
    """A discriminator whose generator trains with it, and is in no model folder."""

    training_only = ("generator.",)

    def __init__(self):
        super().__init__(PAIR_CONFIG)
        self.generator = BertForMaskedLM(PAIR_CONFIG)
        self.architecture = "BertForTokenClassification"


class Samples(InMemoryDataset):
    max_labelled_per_sample, max_sequences_per_sample = 8, 1

    def digest(self) -> str:
        return "samples"


def summed_losses(model: Pair, micro_batch: MicroBatch) -> Tensor:
    stream = TokenStream.from_batch(micro_batch, 32)
    positions_M, labels_M = micro_batch["mlm_positions"], micro_batch["mlm_labels"]
    logits_MV = model.generator(stream, mlm_positions=positions_M).prediction_logits
    filled_T = stream.input_ids.index_copy(0, positions_M, logits_MV.argmax(dim=1))
    logits_T = model(stream._replace(input_ids=filled_T)).logits[:, 0]
    is_changed_T = (filled_T != stream.input_ids).float()
    loss = F.binary_cross_entropy_with_logits(logits_T, is_changed_T, reduction="sum")
    return loss + F.cross_entropy(logits_MV, labels_M, reduction="sum")


def trained_pair(
    output: Path, steps_this_run: int | None = None, is_frozen: bool = False
) -> tuple[Pair, Path]:
    """A pair after four updates, or so many in this process, and its model folder. is_frozen: the
    embeddings of the discriminator are.
    """
    torch.manual_seed(0)
    model = Pair()
    model.bert.embeddings.requires_grad_(not is_frozen)
    return model, trained(model, summed_losses, output, steps_this_run)


def trained(
    model: PreTrainedModel, summed: Callable, output: Path, steps_this_run: int | None
) -> Path:
    """The folder of a model that has made four updates, or so many more."""
    return train(
        model,
        OwnTask(summed, 32),
        Samples(LENGTHS * 4, 200),
        TOKENIZER,
        output,
        resume_from_checkpoint=True,
        max_steps=4,
        steps_this_run=steps_this_run,
        batch_size=4,
        learning_rate=1e-3,
        log_freq=1,
    )


def test_a_generator_that_trains_too_is_resumed_and_is_in_no_model_folder(tmp_path):
    torch.manual_seed(0)
    start = Pair().generator.word_embeddings.weight.detach().clone()
    whole, folder = trained_pair(tmp_path / "one")
    trained_pair(tmp_path / "parts", 2)
    parts, second = trained_pair(tmp_path / "parts")
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(whole.generator.word_embeddings.weight, start)
    assert not whole.word_embeddings.sparse  # which other optimizers refuse
    names = dict(BertForTokenClassification(PAIR_CONFIG).named_parameters()).keys()
    for path in (folder, second):
        assert load_file(path / "model.safetensors").keys() == names
    whole.save_pretrained(tmp_path / "saved")
    loaded = BertForTokenClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.classifier.weight, whole.classifier.weight)


def test_parameters_without_gradients_never_train_and_the_run_is_resumed(tmp_path):
    torch.manual_seed(0)
    start = dict(Pair().named_parameters())
    whole, _ = trained_pair(tmp_path / "one", is_frozen=True)
    trained_pair(tmp_path / "parts", 2, is_frozen=True)
    parts, _ = trained_pair(tmp_path / "parts", is_frozen=True)
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q), name
        is_frozen = name.startswith("bert.embeddings.")
        assert torch.equal(p, start[name]) == is_frozen or "pooler" in name, name


def test_a_second_model_is_in_the_estimate_of_the_memory():
    generator = make_task().generator
    config = RunConfig(
        TrainerConfig(1, checkpoint_folder=Path("unused")),
        LoaderConfig(4, 4, 32, 4),
        OptimizerConfig(),
        ScheduleConfig(1e-4),
        ParallelConfig(),
        StartConfig(),
        runtime=RuntimeConfig(device="cpu"),
    )
    size = 4 * num_parameters(generator)
    without = estimate_memory(discriminator(), MemorySettings(config))
    settings = MemorySettings(config, task_memory={"weights": size})
    assert estimate_memory(discriminator(), settings).total - without.total == size


def test_another_second_model_is_another_run():
    tokenizer = SimpleNamespace(vocab_sha256="v")

    def identity(task: PretrainingTask) -> dict:
        values = (None, CONFIG, tokenizer, "data", RunConfig.seed, None)
        return identity_of(*values, task.identity())

    first, same, other = map(make_task, (1, 1, 2))
    assert first_difference(identity(first), identity(same)) is None
    assert first_difference(identity(first), identity(other)).startswith("generator ")
    assert "this run uses None" in first_difference(identity(first), identity(PretrainingTask()))
    old = {name: value for name, value in identity(first).items() if name != "task"}
    assert first_difference(old, identity(PretrainingTask())) is None  # of a run before


def summed_squares(model: BertModel, micro_batch: MicroBatch) -> Tensor:
    return model(TokenStream.from_batch(micro_batch, 32)).last_hidden_state.square().sum()


def trained_encoder(output: Path, steps_this_run: int | None = None) -> BertModel:
    """After four updates, or so many in this process, of a loss without the pooler."""
    torch.manual_seed(0)
    model = BertModel(PAIR_CONFIG)
    trained(model, summed_squares, output, steps_this_run)
    return model


def test_a_run_whose_loss_leaves_parameters_out_is_resumed(tmp_path):
    whole = trained_encoder(tmp_path / "one")
    trained_encoder(tmp_path / "parts", 2)
    parts = trained_encoder(tmp_path / "parts")
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q), name
