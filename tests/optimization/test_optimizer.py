"""LAMB against its algorithm in float64, and the step of every optimizer."""

import copy
import inspect

import numpy as np
import pytest
import torch
from conftest import TINY
from optimizer_steps import MODEL, SHAPES, STEPS, gradients_of_steps, set_gradients
from small_runs import losses, torchs_adamw, train, transformers_batch
from torch import nn
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining
from transformers import get_linear_schedule_with_warmup

from bert_recipe.config import OptimizerConfig
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.encoders.distilbert import DistilBertConfig, DistilBertForMaskedLM
from bert_recipe.model.encoders.electra import ElectraConfig, ElectraForMaskedLM
from bert_recipe.model.encoders.modernbert import ModernBertConfig, ModernBertForMaskedLM
from bert_recipe.optimization.adamw import MAX_SHARE, AdamW
from bert_recipe.optimization.lamb import Lamb
from bert_recipe.optimization.muon import POLAR_EXPRESS, orthogonalize
from bert_recipe.optimization.norms import total_norm
from bert_recipe.optimization.protocol import apply_step, parameter_groups, undecayed_parameters
from bert_recipe.optimization.registry import SPECS, make_optimizer

UNDECAYED = {"dense.bias", "LayerNorm.weight", "LayerNorm.bias"}


def initial_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.5, shape) for name, shape in SHAPES.items()}
    weights["LayerNorm.bias"][:] = 0  # as in a new model: ||w|| is zero
    weights["empty.weight"][:] = 0
    return {name: values.astype(np.float32) for name, values in weights.items()}


def lamb_in_float64(
    weights,
    gradients,
    lrs,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=None,
    bias_correction=True,
    trust_bounds=None,
    adapt_undecayed=False,
) -> dict[str, np.ndarray]:
    """The weights after all steps: the paper and NVIDIA's recipe, line by line."""
    beta1, beta2 = betas
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    m = {name: np.zeros_like(w) for name, w in weights.items()}
    v = {name: np.zeros_like(w) for name, w in weights.items()}
    for t, (grads, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        grads = {name: g.astype(np.float64) for name, g in grads.items()}
        if max_grad_norm is not None:
            norm = sum((g**2).sum() for g in grads.values()) ** 0.5
            grads = {name: g / max(1.0, norm / max_grad_norm) for name, g in grads.items()}
        for name, w in weights.items():
            g = grads[name]
            decay = 0.0 if name in UNDECAYED else weight_decay
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            m_hat, v_hat = m[name], v[name]
            if bias_correction:
                m_hat, v_hat = m_hat / (1 - beta1**t), v_hat / (1 - beta2**t)
            u = m_hat / (np.sqrt(v_hat) + eps) + decay * w
            weight_norm, update_norm = (w**2).sum() ** 0.5, (u**2).sum() ** 0.5
            r = 1.0
            if (decay > 0 or adapt_undecayed) and weight_norm > 0 and update_norm > 0:
                r = weight_norm / update_norm
                if trust_bounds is not None:
                    r = min(max(r, trust_bounds[0]), trust_bounds[1])
            weights[name] = w - lr * r * u
    return weights


def as_parameters(weights) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.tensor(values)) for name, values in weights.items()}


def lamb(parameters, lr=0.01, weight_decay=0.01, **options) -> Lamb:
    return Lamb(
        parameter_groups(MODEL, weight_decay, parameters), lr, weight_decay=weight_decay, **options
    )


def assert_close(parameters, expected) -> None:
    for name, p in parameters.items():
        difference = np.linalg.norm(p.detach().double().numpy() - expected[name])
        assert difference <= 1e-6 * np.linalg.norm(expected[name]), name


def snapshot(optimizer, parameters) -> list[torch.Tensor]:
    states = [
        value
        for p in parameters.values()
        for _, value in sorted(optimizer.state.get(p, {}).items())
    ]
    return [tensor.detach().clone() for tensor in (*parameters.values(), *states)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes tensors consist of several chunks, the last one shorter."""
    for module in ("lamb", "norms"):
        monkeypatch.setattr(f"bert_recipe.optimization.{module}.CHUNK", 1000)


@pytest.mark.parametrize("foreach", [False, True], ids=["chunks", "foreach"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8},
        {"bias_correction": False},
        {"trust_bounds": (0.01, 0.3)},
        {"adapt_undecayed": True},
        {
            "bias_correction": False,
            "trust_bounds": (0.01, 0.3),
            "adapt_undecayed": True,
        },  # DeepSpeed's
    ],
    ids=str,
)
def test_lamb_matches_the_algorithm_in_float64(options, foreach):
    parameters = as_parameters(initial_weights())
    rate = torch.tensor(0.0)  # a tensor is read in every step
    optimizer = lamb(parameters, rate, **options, foreach=foreach)
    lrs = [0.02 * (k + 1) / STEPS for k in range(STEPS)]
    for grads, lr in zip(gradients_of_steps(), lrs, strict=True):
        rate.fill_(lr)
        set_gradients(parameters, grads)
        optimizer.step()
    assert_close(
        parameters, lamb_in_float64(initial_weights(), gradients_of_steps(), lrs, **options)
    )


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "gradient", [None, torch.zeros(SHAPES["output.weight"])], ids=["none", "zero"]
)
def test_parameter_without_gradient_does_not_change(gradient, foreach):
    """Nor with a zero one, where the trust ratio would be infinite."""
    parameters = as_parameters(initial_weights())
    optimizer = lamb(parameters, weight_decay=0.0, adapt_undecayed=True, foreach=foreach)
    set_gradients(parameters, gradients_of_steps(1)[0])
    parameters["output.weight"].grad = gradient
    before = parameters["output.weight"].detach().clone()
    optimizer.step()
    assert torch.equal(parameters["output.weight"], before)
    assert not torch.equal(
        parameters["dense.weight"], torch.tensor(initial_weights()["dense.weight"])
    )


def test_norm_of_millions_of_numbers_is_accurate(monkeypatch):
    """torch's own norm has an error of 3e-5 here."""
    monkeypatch.undo()
    torch.manual_seed(0)
    tensors = [torch.randn(3000, 1000) / 50, torch.full((7,), 3.0), torch.zeros(0)]
    exact = sum(float(t.double().square().sum()) for t in tensors) ** 0.5
    assert total_norm(tensors).item() == pytest.approx(exact, rel=2e-6)
    assert total_norm([*tensors, torch.tensor([float("nan")])]).isnan()
    assert total_norm([*tensors, torch.tensor([float("-inf")])]).isinf()
    assert total_norm([]) == 0


def named_optimizer(name, parameters):
    if name == "Lamb, foreach":
        return lamb(parameters, lr=torch.tensor(0.01), foreach=True)
    return make_optimizer(OptimizerConfig(name), MODEL, torch.tensor(0.01), parameters)


@pytest.mark.parametrize("name", ["Lamb", "Lamb, foreach", "AdamW", "Muon", "NorMuon"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_step_with_a_gradient_that_is_not_finite_changes_nothing(name, steps_before):
    runs = []
    for skips in (False, True):
        parameters = as_parameters(initial_weights())
        optimizer = named_optimizer(name, parameters)
        for step, grads in enumerate(gradients_of_steps(6)):
            if skips and step == steps_before:
                before = snapshot(optimizer, parameters)
                set_gradients(parameters, grads, factor=float("inf"))
                apply_step(optimizer, torch.tensor(1.0), torch.tensor(1.0))
                if steps_before:  # a first step may create moments of zeros
                    assert all(map(torch.equal, snapshot(optimizer, parameters), before))
            set_gradients(parameters, grads)
            apply_step(optimizer, torch.tensor(1.0), torch.tensor(0.0))
        runs.append(snapshot(optimizer, parameters))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name", ["Lamb", "Lamb, foreach"])
def test_lamb_divides_gradients_by_loss_scale_and_clipping(name):
    """Loss scale 1024, and the factor that brings each step's norm to 0.5 at most."""
    parameters = as_parameters(initial_weights())
    optimizer = named_optimizer(name, parameters)
    for grads in gradients_of_steps():
        set_gradients(parameters, grads, factor=1024.0)
        norm = sum((g.astype(np.float64) ** 2).sum() for g in grads.values()) ** 0.5
        apply_step(
            optimizer,
            torch.tensor(1024 * max(1.0, norm / 0.5), dtype=torch.float32),
            torch.tensor(0.0),
        )
    expected = lamb_in_float64(
        initial_weights(), gradients_of_steps(), [0.01] * STEPS, max_grad_norm=0.5
    )
    assert_close(parameters, expected)


def test_parameters_without_decay_are_known_by_module_and_dimensions_not_by_name():
    """For BERT, those of transformers:
    test_losses_of_fifty_adamw_steps_match_transformers_and_torch.
    """
    layers = {
        "norm1": nn.LayerNorm([3, 4]),
        "conv": nn.Conv2d(3, 5, 2),
        "LayerNorm_projection": nn.Linear(4, 4),
    }
    model = nn.ModuleDict(layers)
    model.scale = nn.Parameter(torch.ones(()))
    decayed = dict(model.named_parameters()).keys() - undecayed_parameters(model)
    assert decayed == {"conv.weight", "LayerNorm_projection.weight"}


def transformers_losses(folder, batch, steps, batch_size, seed, lr):
    """The losses of transformers' model with torch's AdamW and BERT's groups, warmup, decay and
    clipping.
    """
    model = HFForPreTraining.from_pretrained(folder, attn_implementation="eager").train()
    optimizer = torchs_adamw(model, lr)
    losses = []
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    for step in range(steps):
        rows = sample_order(
            np.arange(step * batch_size, (step + 1) * batch_size), len(batch["labels"]), seed
        )
        loss = model(**{name: values[rows] for name, values in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_losses_of_fifty_adamw_steps_match_transformers_and_torch(inputs, tmp_path):
    steps, batch_size, lr, seed = 50, 8, 2e-3, 5
    torch.manual_seed(0)
    config = HFConfig.from_json_file(inputs.config_without_dropout)
    HFForPreTraining(config).save_pretrained(tmp_path / "start")
    # Two micro-batches per step here, one padded batch in transformers.
    flags = (
        "--optimizer",
        "AdamW",
        "--max-steps",
        steps,
        "--learning-rate",
        lr,
        "--gradient-merge-steps",
        2,
    )
    flags += ("--from-pretrained-params", tmp_path / "start", "--seed", seed, "--log-freq", 1)
    train(inputs.command(tmp_path / "out", *flags, dropout=False))
    # 0: before the first update.
    ours = [loss for step, loss in sorted(losses(tmp_path / "out").items()) if step]
    dataset = PretrainingDataset(inputs.shards, config.vocab_size)
    batch = transformers_batch(dataset.rows(np.arange(len(dataset))))
    theirs = transformers_losses(tmp_path / "start", batch, steps, batch_size, seed, lr)
    assert len(ours) == steps
    assert theirs[-1] < theirs[0] - 1  # the model learns, so the updates matter
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


MUON_CONFIG = {
    **{"vocab_size": 70, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 48, "local_attention": 4},
}


def polar_express(matrix: torch.Tensor) -> torch.Tensor:
    """U p(S) V' of a matrix U S V' in float64, for the composed polynomial p."""
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    return u * values @ vh


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalize_makes_singular_values_nearly_equal(shape, dtype):
    """Over four decades, as in real momentum; the error is that of the products' type, and, where
    the gram is multiplied, that of its smallest eigenvalues.
    """
    is_square = shape[0] == shape[1]
    errors = {torch.float32: 1e-4 if is_square else 1e-3, torch.bfloat16: 0.1}
    error = errors[dtype]
    torch.manual_seed(0)
    rank = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64))[0] for size in shape
    )
    values = torch.logspace(0, -4, rank, dtype=torch.float64)
    matrices = torch.stack(
        [left * values @ right.T, 1e-3 * left @ right.T, torch.zeros(shape, dtype=torch.float64)]
    )
    orthogonal = orthogonalize(matrices.float(), dtype).double()
    for matrix, result in zip(matrices[:2], orthogonal[:2], strict=True):
        assert (result - polar_express(matrix)).norm() < error * result.norm()
        kept = torch.linalg.svdvals(matrix) >= 0.003 * matrix.norm()
        singular = torch.linalg.svdvals(left.T @ result @ right)
        assert singular.max() < 1.21 + error and singular[: int(kept.sum())].min() > 0.77 - error
    assert not orthogonal[2].any()


@pytest.mark.parametrize("optimizer_name", ["Muon", "NorMuon"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ModernBertForMaskedLM(ModernBertConfig(**MUON_CONFIG)),
        lambda: BertForPreTraining(BertConfig(**TINY)),
        lambda: ElectraForMaskedLM(ElectraConfig(**TINY, embedding_size=16)),
        lambda: DistilBertForMaskedLM(DistilBertConfig.from_dict(TINY)),
    ],
)
def test_muon_orthogonalizes_each_matrix_of_layers_and_transform_and_leaves_the_rest_to_adamw(
    make, optimizer_name
):
    model = make()
    optimizer = make_optimizer(
        OptimizerConfig(optimizer_name, weight_decay=0.1), model, torch.tensor(0.01)
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        p.grad = torch.randn_like(p)
        theirs[name].grad = p.grad.clone()
    undecayed = undecayed_parameters(model)
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs[name]], "weight_decay": 0.0 if name in undecayed else 0.1}
            for name in theirs
        ],
        0.01,
        eps=1e-6,
    )
    apply_step(optimizer, torch.tensor(2.0), torch.zeros(()))
    for p in theirs.values():
        p.grad /= 2
    adamw.step()
    matrices = 0
    for name, p in model.named_parameters():
        is_transform = "dense" in name or "vocab_transform" in name
        if p.dim() == 2 and (".layer" in name or (is_transform and "pooler" not in name)):
            matrices += 1
            count = 3 if "Wqkv" in name else 2 if "Wi" in name else 1
            # The first step's momentum is 0.05 g, and u = 0.95 * 0.05 g + 0.05 g; the scale has no
            # effect.
            parts = [polar_express(part) for part in p.grad.chunk(count)]
            size = max(parts[0].shape)
            update = torch.cat(parts)
            if optimizer_name == "NorMuon":
                update /= (0.95 + 0.05 * size * update.square().mean(dim=1, keepdim=True)).sqrt()
            expected = before[name].double() * (1 - 0.01 * 0.1) - 0.01 * 0.2 * size**0.5 * update
            torch.testing.assert_close(
                p.detach().double(), expected, rtol=1e-5, atol=1e-6, msg=name
            )
        else:
            torch.testing.assert_close(
                p.detach(), theirs[name].detach(), rtol=1e-6, atol=1e-7, msg=name
            )
    assert matrices == (9 if "ModernBert" in type(model).__name__ else 13)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sparse_gradients_of_a_table_give_the_bits_of_dense_ones(weight_decay):
    table = torch.randn(4000, 48, generator=torch.Generator().manual_seed(0))
    options = {"lr": torch.tensor(1e-2), "weight_decay": weight_decay, "fused": True}
    dense, sparse = (torch.nn.Parameter(table.clone()) for _ in range(2))
    of_torch, ours = torch.optim.AdamW([dense], **options), AdamW([sparse], **options)
    shares = []
    for step in range(24):
        generator = torch.Generator().manual_seed(step)
        if step == 3:
            ours = copy.deepcopy(ours)
            (sparse,) = ours.param_groups[0]["params"]
        # More and more rows, of which many occur several times.
        ids = (torch.rand(40, generator=generator) ** 3 * 4000 * (step + 1) / 24).long()
        grad = torch.randn(40, 48, generator=generator)
        of_torch.zero_grad()
        nn.functional.embedding(ids, dense).backward(grad)
        if step != 9:  # then another micro-batch of the same update has a dense gradient
            ours.zero_grad()
            nn.functional.embedding(ids, sparse, sparse=True).backward(grad)
        else:
            sparse.grad = dense.grad.clone()
        if step == 12:  # as of a checkpoint, in which another row has moments
            assert shares[-1] < MAX_SHARE
            for key in ("exp_avg", "exp_avg_sq"):
                of_torch.state[dense][key][-1] = 1.0
                ours.state[sparse][key].copy_(of_torch.state[dense][key].clone())
        for optimizer in (of_torch, ours):
            apply_step(optimizer, torch.tensor(1.7), torch.tensor(float(step == 5)))
        assert torch.equal(dense, sparse), step
        for key, value in of_torch.state[dense].items():
            assert torch.equal(value, ours.state[sparse][key]), (step, key)
        shares.append((ours.state[sparse]["exp_avg"] != 0).any(1).double().mean())
    assert shares[0] < MAX_SHARE < shares[-1]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}])
def test_options_that_rows_lack_refuse_sparse_gradients(options):
    table = nn.Parameter(torch.ones(4, 2))
    nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        AdamW([table], **options, fused=bool(options)).step()


def test_no_optimizer_imports_torchs_compiler(monkeypatch):
    """Which takes a second: torch's own optimizers do, to keep it out of their methods."""

    def compiler(*_args, **_kwargs):
        raise AssertionError("torch._dynamo is imported here")

    for name in ("add_param_group", "zero_grad"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        monkeypatch.setattr(method, "__dynamo_disable", compiler, raising=False)
    with pytest.raises(AssertionError, match="imported here"):
        torch.optim.SGD(MODEL.parameters(), 0.1)
    monkeypatch.setattr(torch._dynamo, "graph_break", compiler)
    for name in SPECS:
        model = copy.deepcopy(MODEL)
        optimizer = make_optimizer(OptimizerConfig(name), model, 0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
