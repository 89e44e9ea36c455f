"""Every attention implementation against softmax(QK' / sqrt(D)) V computed sequence by sequence.
With dropout, and on a GPU: test_attention_check.py.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from encoder_cases import CPU_IMPLEMENTATIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bert_recipe.model.attention import (
    IMPLEMENTATIONS,
    EfficientAttention,
    FlashAttention,
    LengthBucketedAttention,
    PaddedAttention,
    StreamLayout,
    default_implementation,
    prepare_attention,
)
from bert_recipe.model.costs.attention import (
    MEMORY,
    LayerAttention,
    PassSizes,
    attention_memory,
)
from bert_recipe.model.costs.memory import activation_memory
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.encoders.modernbert import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
)
from bert_recipe.model.kernels import length_bucketed
from bert_recipe.model.kernels.length_bucketed import length_buckets
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.parallel.attention_choice import choose_attention

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HEADS, SIZE = 2, 4


def cu_seqlens_of(lengths) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def prepared(implementation, lengths, max_seqlen=None, filler=0, **options):
    cu_seqlens = torch.tensor(cu_seqlens_of(lengths), dtype=torch.int32)
    layout = StreamLayout(cu_seqlens, max_seqlen or max(lengths), sum(lengths) + filler, **options)
    return prepare_attention(implementation, layout)


def probabilities(query, key, window) -> torch.Tensor:
    """Of one sequence, as [heads, queries, keys]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    places = torch.arange(len(query), device=query.device)
    if window is not None:
        scores = scores.masked_fill((places - places[:, None]).abs() > window, -math.inf)
    return scores.softmax(-1)


def attention_of_each_sequence(qkv, lengths, *pairs) -> torch.Tensor:
    parts = [part.unbind(1) for part in qkv.split(lengths)]
    return torch.cat(
        [torch.einsum("hqk,khd->qhd", probabilities(q, k, *pairs), v) for q, k, v in parts]
    )


def assert_matches_reference(attention, qkv, lengths, window=None, **tolerance) -> None:
    """Compares the output and the gradient, for a loss that weights all outputs differently."""
    weight = torch.randn(sum(lengths), *qkv.shape[2:]).to(qkv)
    out = attention(qkv, 0.0)
    (gradient,) = torch.autograd.grad((out * weight).sum(), qkv)
    exact = qkv.detach().double().requires_grad_()
    expected = attention_of_each_sequence(exact, lengths, window)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), exact)
    torch.testing.assert_close(out, expected.to(qkv.dtype), **tolerance)
    torch.testing.assert_close(gradient, expected_gradient.to(qkv.dtype), **tolerance)


def with_filler(attention, count):
    """`attention` with `count` tokens of filler behind the sequences, whose states and gradients
    are finite.
    """

    def attend(qkv, dropout_prob):
        filled = torch.cat([qkv, torch.randn(count, *qkv.shape[1:]).to(qkv)])
        filled.retain_grad()
        out = attention(filled, dropout_prob)
        # In freed memory, which the filler's gradients must not be left in.
        torch.full_like(filled, math.nan)
        out.sum().backward(retain_graph=True)
        assert out.isfinite().all() and filled.grad.isfinite().all()
        return out[: len(qkv)]

    return attend


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@settings(max_examples=50)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 2, 9, 10, 10, 10, 10, 20]), min_size=1, max_size=12
    ).filter(any),
    is_sorted=st.booleans(),
    spare=st.integers(0, 3),
    window=st.sampled_from([None, 0, 1, 8, 9, 30]),
    tile=st.sampled_from([1, 3, 128]),
    filler=st.sampled_from([0, 1, 25]),
)
def test_output_and_gradient_match_softmax_of_each_sequence(
    implementation, lengths, is_sorted, spare, window, tile, filler
):
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    torch.manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(length_bucketed, "TILE_QUERIES", tile)
        pairs = {"window": window}
        attention = prepared(
            implementation, lengths, max_seqlen=max(lengths) + spare, filler=filler, **pairs
        )
        assert_matches_reference(with_filler(attention, filler), qkv, lengths, **pairs)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_other_types_match_float64_to_their_precision(implementation, dtype, tolerance):
    lengths = [17, 30, 30, 30, 30, 2, 0, 29]
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    qkv = qkv.to(dtype).requires_grad_()
    attention = with_filler(prepared(implementation, lengths, filler=23), 23)
    assert_matches_reference(attention, qkv, lengths, rtol=tolerance, atol=tolerance)


def test_short_sequences_in_inference_match_float64_and_keep_nans_to_themselves():
    lengths = [16, 9, 3, 3, 1]
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    qkv = qkv.to(torch.bfloat16)
    expected = attention_of_each_sequence(qkv.double(), lengths, None)[:-1]
    qkv[-1] = math.nan  # the last sequence
    with torch.no_grad():
        out = prepared("length_bucketed", lengths)(qkv, 0.0)
    torch.testing.assert_close(out[:-1].double(), expected, rtol=3e-2, atol=3e-2)
    assert out[-1].isnan().all()


def kernel(query, key, value, cu_seqlens, max_seqlen, *pairs) -> torch.Tensor:
    lengths = cu_seqlens.diff()
    assert (
        cu_seqlens.dtype == torch.int32
        and lengths.min() >= 0
        and lengths.max() <= max_seqlen <= len(query)
    )
    qkv = torch.stack([query, key, value], dim=1)[: lengths.sum()]
    # The operators leave tokens outside all sequences undefined.
    out = torch.full_like(query, math.nan)
    out[: lengths.sum()] = attention_of_each_sequence(qkv, lengths.tolist(), *pairs)
    return out


def kernel_gradients(grad, query, key, value, cu_seqlens, max_seqlen, *pairs) -> list[torch.Tensor]:
    """Written out, because autograd is off inside of an operator's kernel."""
    lengths = cu_seqlens.diff().tolist()
    assert max(lengths) <= max_seqlen <= len(query)
    grads = [torch.full_like(query, math.nan) for _ in range(3)]
    streams = (
        stream[: sum(lengths)].split(lengths) for stream in (query, key, value, grad, *grads)
    )
    for q, k, v, g, *parts in zip(*streams, strict=True):
        probs = probabilities(q, k, *pairs)
        grad_probs = torch.einsum("qhd,khd->hqk", g, v)
        grad_scores = (
            probs
            * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))
            / math.sqrt(q.shape[-1])
        )
        products = (
            ("hqk,khd->qhd", grad_scores, k),
            ("hqk,qhd->khd", grad_scores, q),
            ("hqk,qhd->khd", probs, g),
        )
        for part, product in zip(parts, products, strict=True):
            part.copy_(torch.einsum(*product))
    return grads


@pytest.fixture
def cpu_kernels():
    """CUDA's operators, with their schemas and derivatives, and kernels for a CPU."""

    def flash_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, window_size_left=None, **_
    ):
        assert cu_q is cu_k or torch.equal(cu_q, cu_k)
        assert max_q == max_k and not (dropout or debug or causal)
        empty = q.new_empty(0)
        return (
            kernel(q, k, v, cu_q, max(cu_q.diff().max(), 1), window_size_left),
            empty,
            empty,
            empty,
            empty,
        )

    def flash_backward(
        grad,
        q,
        k,
        v,
        _out,
        _lse,
        cu_q,
        _cu_k,
        max_q,
        _max_k,
        _p,
        _causal,
        *_,
        window_size_left=None,
        **__,
    ):
        return tuple(kernel_gradients(grad, q, k, v, cu_q, min(max_q, len(q)), window_size_left))

    def efficient_forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, logsumexp):
        assert len(q) == 1 and torch.equal(cu_q, cu_k) and max_q == max_k
        assert bias is None and not (dropout or mask_type) and logsumexp
        empty = q.new_empty(0)
        return (
            kernel(q[0], k[0], v[0], cu_q, max_q, None)[None],
            empty,
            empty,
            empty,
            max_q,
            max_k,
        )

    def efficient_backward(grad, q, k, v, _bias, _out, cu_q, _cu_k, max_q, _max_k, _lse, *_):
        return *(
            g[None] for g in kernel_gradients(grad[0], q[0], k[0], v[0], cu_q, max_q, None)
        ), q.new_empty(0)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", flash_forward)
    library.impl("_flash_attention_backward", flash_backward)
    library.impl("_efficient_attention_forward", efficient_forward)
    library.impl("_efficient_attention_backward", efficient_backward)
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("implementation", "window"), [("flash", None), ("flash", 3), ("efficient", None)]
)
@pytest.mark.parametrize("lengths", [[20, 20, 7, 1, 0, 0], [5], [1, 1, 1], [24]])
@pytest.mark.parametrize("filler", [None, 0, 1, 60])
def test_variable_length_attention_covers_sequences_and_filler(
    cpu_kernels, implementation, window, lengths, filler
):
    """Also streams with fewer tokens than the longest sequence may have."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, 3, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor(cu_seqlens_of(lengths), dtype=torch.int32)
    has_filler = filler is not None
    filler = filler or 0
    layout = StreamLayout(cu_seqlens, 24, tokens + filler, window, has_filler)
    attention = prepare_attention(implementation, layout)
    assert type(attention) is IMPLEMENTATIONS[implementation]
    assert has_filler or attention.cu_seqlens is cu_seqlens  # no empty sequences

    assert_matches_reference(with_filler(attention, filler), qkv, lengths, window)


@pytest.mark.parametrize(
    ("lengths", "multiple", "buckets"),
    [
        (
            [4, 4, 0, 3, 3, 1],
            1,
            [(0, [4, 4], 4), (8, [3, 3], 3), (14, [1], 1)],
        ),  # without empty sequences
        (
            [20, 19, 19, 18, 17, 17],
            1,
            [(0, [20, 19, 19, 18], 20), (76, [17, 17], 17)],
        ),  # similar lengths together
        (
            [20] * 5 + [19, 19, 18],
            1,
            [(0, [20] * 5, 20), (100, [19, 19, 18], 19)],
        ),  # but many equal lengths alone
        ([19, 20, 20, 20, 20, 19], 1, [(0, [19], 19), (19, [20] * 4, 20), (99, [19], 19)]),
        ([33, 32, 17, 9, 8, 1], 16, [(0, [33], 48), (33, [32, 17], 32), (82, [9, 8, 1], 16)]),
    ],
)
def test_buckets_hold_neighbours_of_similar_length(lengths, multiple, buckets):
    assert length_buckets(cu_seqlens_of(lengths), multiple) == buckets


def flops_of(lengths, num_tokens, window=None) -> int:
    """Of a forward and backward pass of length-bucketed attention."""
    cu_seqlens = torch.tensor(cu_seqlens_of(lengths), dtype=torch.int32)
    qkv = torch.randn(num_tokens, 3, HEADS, SIZE, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layout = StreamLayout(cu_seqlens, max(lengths), num_tokens, window)
        prepare_attention("length_bucketed", layout)(qkv, 0.0).sum().backward()
    return counter.get_total_flops()


def test_length_bucketed_attention_computes_no_products_for_filler_and_few_beyond_a_window():
    assert flops_of([20, 20], 400) == flops_of([20, 20], 40) == 6 * 2 * (2 * HEADS * 20 * 20 * SIZE)
    assert flops_of([1024], 1024, window=64) < 0.25 * flops_of([1024], 1024)


@pytest.mark.parametrize(
    ("device", "dtypes", "has_dropout", "window", "chosen"),
    [
        (CPU, (torch.float32, torch.bfloat16), False, None, LengthBucketedAttention),
        (CPU, (torch.float32, torch.bfloat16), True, 8, LengthBucketedAttention),
        (GPU, (torch.float16, torch.bfloat16), False, None, FlashAttention),
        (GPU, (torch.float16, torch.bfloat16), True, 8, FlashAttention),
        (GPU, (torch.float32,), False, None, EfficientAttention),
        (GPU, (torch.float32,), True, None, PaddedAttention),
        (GPU, (torch.float32,), False, 8, PaddedAttention),
    ],
)
def test_implementation_depends_on_device_type_dropout_and_window(
    device, dtypes, has_dropout, window, chosen
):
    layout = StreamLayout(torch.tensor([0, 5], dtype=torch.int32), 5, 5, window)
    names = {default_implementation(device, dtype) for dtype in dtypes}
    assert {type(prepare_attention(name, layout, has_dropout)) for name in names} == {chosen}


@pytest.mark.parametrize("prob", [0.0, 0.1])
@pytest.mark.parametrize("model_class", [BertForPreTraining, ModernBertForMaskedLM])
def test_a_model_in_training_with_attention_dropout_avoids_the_efficient_operator(
    model_class, prob
):
    config = model_class.config_class(40, 8, 3, 1, 16).with_dropout(prob)
    model = model_class(config).base_model
    stream = TokenStream.from_padded(torch.ones(1, 4).int())[0]
    model.attention_implementation = "efficient"

    def attention_of_first_layer():
        prepared = model.prepare_attentions(stream, torch.zeros(4, 8))[0]
        return type(getattr(prepared, "attention", prepared))  # without rotary positions

    assert attention_of_first_layer() is (PaddedAttention if prob else EfficientAttention)
    model.eval()
    assert attention_of_first_layer() is EfficientAttention


def test_the_estimate_counts_the_attention_that_is_used():
    sizes = PassSizes(700, 8, 10, 128, 4, 4, 1, "efficient", False, "cuda")
    layer = LayerAttention(num_heads=2, hidden_size=64, has_dropout=False, rows=700)
    with_dropout = layer._replace(has_dropout=True)
    efficient, padded = (
        MEMORY[IMPLEMENTATIONS[name]](sizes, with_dropout) for name in ("efficient", "padded")
    )
    assert efficient != padded
    assert attention_memory(sizes, layer) == efficient
    assert attention_memory(sizes, with_dropout) == padded
    with_window = layer._replace(window=8)
    padded = MEMORY[PaddedAttention](sizes, with_window)
    assert attention_memory(sizes, with_window) == padded


@pytest.mark.parametrize("max_seqlen", [16, 13])
def test_layers_keep_one_mask_of_padded_attention(max_seqlen):
    """At 8,192 tokens in float32, a mask has 256 MiB per sequence."""
    cu_seqlens = torch.tensor([0, max_seqlen, max_seqlen + 5], dtype=torch.int32)
    prepared = prepare_attention("padded", StreamLayout(cu_seqlens, max_seqlen, 21, window=3))
    states = torch.randn(21, 3, 2, 8, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _layer in range(3):
            prepared(states, 0.0)
    masks = [tensor for tensor in kept if tensor.shape[-2:] == (max_seqlen, max_seqlen)]
    assert len(masks) == 3 and len({mask.untyped_storage().data_ptr() for mask in masks}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_has_the_masks_that_layers_share(dtype):
    """Of ModernBERT, whose local and global layers have one each."""
    config = ModernBertConfig(
        64, 16, num_hidden_layers=5, num_attention_heads=2, intermediate_size=32
    )
    model = ModernBertModel(config)
    model.attention_implementation = "padded"
    lengths = [128, 128]
    stream = TokenStream.from_padded(torch.zeros(len(lengths), 128, dtype=torch.int64))[0]
    prepared = {*model.prepare_attentions(stream, torch.zeros(256, 16, dtype=dtype))}
    masks = sum(layout.attention.bias.untyped_storage().nbytes() for layout in prepared)
    sizes = PassSizes(256, 2, 0, 128, dtype.itemsize, 4, 1, "padded", False, "cuda")
    without = dataclasses.replace(sizes, attention="flash")
    embeddings = [activation_memory(model, setting).embeddings for setting in (sizes, without)]
    assert embeddings[0] - embeddings[1] == masks


def test_the_efficient_operator_is_refused_with_dropout():
    with pytest.raises(ValueError, match="wrong gradients"):
        prepared("efficient", [5])(torch.zeros(5, 3, 1, 8), 0.1)


@pytest.mark.parametrize(
    ("capability", "head_size", "chosen"),
    [
        *(((7, 5), 64, "efficient"), ((7, 5), 12, "padded"), ((9, 0), 12, "padded")),
        *(((8, 0), 64, "auto"), ((9, 0), 256, "auto"), ((8, 9), 192, "auto")),
        *(((8, 6), 256, "efficient"), ((8, 9), 200, "efficient"), ((9, 0), 264, "efficient")),
    ],
)
def test_a_gpu_or_head_size_without_flash_attention_gets_another(
    monkeypatch, capability, head_size, chosen
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = BertConfig(
        100, hidden_size=head_size, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64
    )
    model = BertForPreTraining(config)
    choose_attention(model.base_model, GPU)
    assert model.bert.attention_implementation == chosen
