"""Tests of the whole layer for any device: sizes, options, layouts, forms of the inputs, bits.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelora
from moelora import ops
from moelora.reference import (
    down_lora_delta_reference,
    gate_up_lora_delta_reference,
    moe_lora_reference,
)
from moelora.testing import Shape, check_close, poisoned_memory, random_layer, random_lora, relative_error
from moelora.testing.inputs import random_adapter_ids

SMALL = Shape(hidden=64, inter=32, experts=8, top_k=2)
ACTIVATIONS = ["silu", "gelu_tanh", "swigluoai"]
LAYOUTS = ["gate_up", "up_gate", "interleaved"]


# ---- running and checking, used by all layer tests ----


def run(layer, lora=None, adapter_ids=None, **options):
    """The forward in memory that starts as NaN."""
    with torch.inference_mode(), poisoned_memory():
        return moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)


def oracle(layer, lora=None, adapter_ids=None, **options):
    return moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)


def check(layer, lora=None, adapter_ids=None, **options):
    """Every path that the device has, each row against the oracle; returns the result of "auto"."""
    expected = oracle(layer, lora, adapter_ids, **options)
    for mode in stream_modes(layer.hidden_states.device):
        got = run(layer, lora, adapter_ids, **options, stream_mode=mode)
        assert got.dtype == layer.hidden_states.dtype
        try:
            check_close(got, expected)
        except AssertionError:
            check_close(got, expected, plain=oracle(layer, lora, adapter_ids, **options, dtype=None))
    return got


def stream_modes(device):
    """ "auto" last. On CPU all modes are one path."""
    return ["single", "two", "auto"] if torch.device(device).type == "cuda" else ["auto"]


def make(tokens, device, dtype, shape=SMALL, *, slots=3, rank=8, seed=0, **lora_options):
    """A layer, adapters and an adapter id for each token, some without."""
    layer = random_layer(tokens, shape, dtype=dtype, device=device, seed=seed)
    lora = random_lora(slots, shape, rank, dtype=dtype, device=device, seed=seed, **lora_options)
    return layer, lora, random_adapter_ids(tokens, slots, device=device, seed=seed)


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


# ---- sizes ----


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 64, 257])
def test_every_token_matches_the_oracle(device, dtype, tokens):
    """C12, D10: base rows and adapters mixed, at token counts on both sides of the tile sizes"""
    layer, lora, adapter_ids = make(tokens, device, dtype)
    check(layer)
    check(layer, lora, adapter_ids, **layer.biases)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(1, 1), (2, 2), (4, 4), (5, 3), (8, 2), (16, 1), (32, 4), (32, 32), (128, 8), (384, 8), (512, 10), (512, 22),
     (896, 16), (1024, 8)],
)  # fmt: skip
def test_numbers_of_experts(device, dtype, tokens, experts, top_k):
    """A16, K08: every expert chosen, one expert in all, the most experts and the most per token"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(16, 8, experts, top_k), slots=2)
    check(layer, lora, adapter_ids)


REAL_SIZES = [(2880, 2880), (2880, 360), (2688, 1856), (2048, 96), (4096, 224), (5120, 352), (7168, 256)]


@pytest.mark.parametrize(("hidden", "inter"), REAL_SIZES)
def test_sizes_of_real_models(device, dtype, hidden, inter):
    """C07: per-process sizes that are no multiple of a tile; the result has width H"""
    experts = 8 if torch.device(device).type == "cuda" else 2
    for tokens in (1, 3):
        layer, lora, adapter_ids = make(tokens, device, dtype, Shape(hidden, inter, experts, 2), slots=1)
        assert check(layer, lora, adapter_ids).shape == (tokens, hidden)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 40, 31), (1, 40, 32), (2, 32, 16), (3, 32, 8), (3, 40, 11), (4, 32, 8), (4, 3, 3), (5, 32, 8)],
)
@pytest.mark.parametrize("ranks", [None, [(48, 48), (5, 0), (0, 17), (16, 33)]])
def test_few_tokens_with_adapters_of_their_own(device, dtype, tokens, experts, top_k, ranks):
    """A16: both sides of 32 pairs and of four tokens, several pieces of experts, every slot of another rank"""
    shape = Shape(512, 256, experts, top_k)
    layer, lora, adapter_ids = make(tokens, device, dtype, shape, slots=4, rank=48, ranks=ranks)
    check(layer, lora, adapter_ids)
    check(layer, lora, torch.arange(tokens, dtype=torch.int32, device=device) % 4)


@pytest.mark.parametrize(("hidden", "inter"), [(8, 8), (8, 136), (136, 8), (24, 104), (200, 72)])
def test_small_and_odd_widths(device, dtype, hidden, inter):
    """C07, C08: multiples of 8 that are no multiple of 16; gate and up stay apart"""
    for tokens in (1, 2, 21):
        layer, lora, adapter_ids = make(tokens, device, dtype, Shape(hidden, inter, 5, 3))
        for layout in LAYOUTS:
            check(layer, lora, adapter_ids, gate_up_layout=layout)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("do_finalize", [True, False])
def test_no_tokens(device, dtype, with_lora, do_finalize):
    """B05, B11, C01, C03, F08: T = 0 gives empty results of the right kind, and leaves no error behind"""
    layer, lora, adapter_ids = make(0, device, dtype)
    options = {"lora": lora, "adapter_ids": adapter_ids} if with_lora else {}
    result = run(layer, **options, do_finalize=do_finalize)
    if do_finalize:
        assert result.shape == (0, SMALL.hidden)
        assert (result.dtype, result.device.type) == (dtype, torch.device(device).type)
    else:
        down, weights, rows, lora_input = result
        assert (down.shape, weights.shape, rows.shape) == ((0, SMALL.hidden), (0, SMALL.top_k), (0,))
        assert lora_input.shape == (0, SMALL.top_k, SMALL.inter) if with_lora else lora_input is None
    assert torch.ones(3, device=device).sum().item() == 3
    check(*make(2, device, dtype))


@given(data=st.data())
def test_any_shape(device, dtype, data):
    """Property: whatever the sizes and options, every row is right."""
    draw = data.draw
    experts = draw(st.integers(1, 12), "experts")
    top_k = draw(st.integers(1, min(experts, 6)), "top_k")
    shape = Shape(8 * draw(st.integers(1, 20), "H/8"), 8 * draw(st.integers(1, 12), "I/8"), experts, top_k)
    tokens, slots = draw(st.integers(0, 40), "T"), draw(st.integers(1, 4), "L")
    allocated = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)), "R1, R2")
    used = st.tuples(st.integers(0, allocated[0]), st.integers(0, allocated[1]))
    layer, lora, adapter_ids = make(
        tokens, device, dtype, shape,
        slots=slots, rank=allocated, seed=draw(st.integers(0, 2**20), "seed"),
        ranks=draw(st.none() | st.lists(used, min_size=slots, max_size=slots), "ranks"),
        shared_a=draw(st.booleans(), "shared A"), shared_outer=draw(st.booleans(), "shared outer"),
    )  # fmt: skip
    options = layer.biases if draw(st.booleans(), "biases") else {}
    check(
        layer, lora, adapter_ids, **options,
        activation=draw(st.sampled_from(ACTIVATIONS), "activation"),
        gate_up_layout=draw(st.sampled_from(LAYOUTS), "layout"),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5]), "scale"),
        apply_router_weight_on_input=top_k == 1 and draw(st.booleans(), "weight on input"),
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [4, 96])
def test_the_error_is_at_most_twice_that_of_plain_pytorch(device, dtype, tokens):
    """D02, D03: against the float64 oracle, with GEMMs, rank vectors and z in the same dtype"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(256, 128, 8, 4), rank=16)
    for options in ({}, {"lora": lora, "adapter_ids": adapter_ids}):
        expected = oracle(layer, **options, **layer.biases)
        plain = relative_error(oracle(layer, **options, **layer.biases, dtype=None), expected)
        for mode in stream_modes(device):
            got = run(layer, **options, **layer.biases, stream_mode=mode)
            assert relative_error(got, expected) <= 2 * plain


# ---- options ----


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_activations_layouts_and_biases(device, dtype, activation, layout, with_bias):
    """K11: every combination, with and without adapters"""
    layer, lora, adapter_ids = make(19, device, dtype)
    options = {"activation": activation, "gate_up_layout": layout} | (layer.biases if with_bias else {})
    check(layer, **options)
    check(layer, lora, adapter_ids, **options)


def test_clamp_comes_after_the_delta(device, dtype):
    """D07: gate is clamped from above only, up on both sides, alpha and limit reach the kernel"""
    gate_up = [(20.0, 20.0), (-20.0, -20.0), (20.0, -20.0), (0.0, 0.0), (6.0, 1.0), (3.0, 6.0)]
    delta = [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (5.0, 0.0), (0.0, 5.0)]
    size, tokens = 8, len(gate_up)
    # One expert per token whose gate and up rows all give the wanted values for x = (1, 0, ...); w2 copies z.
    x = torch.zeros(tokens, size)
    x[:, 0] = 1
    w13 = torch.zeros(tokens, 2 * size, size)
    deltas = torch.zeros(tokens, 1, 2 * size)
    for t in range(tokens):
        w13[t, :size, 0], w13[t, size:, 0] = gate_up[t]
        deltas[t, 0, :size], deltas[t, 0, size:] = delta[t]
    w2 = torch.eye(size).expand(tokens, size, size).contiguous()
    weights, ids = torch.ones(tokens, 1), torch.arange(tokens)[:, None]
    tensors = [tensor.to(device, dtype) for tensor in (x, w13, w2)] + [weights.to(device), ids.to(device)]
    for alpha, limit in ((1.702, 7.0), (1.0, 2.5)):
        with torch.inference_mode():
            got = moelora.fused_moe_lora(
                *tensors, activation="swigluoai", activation_alpha=alpha, activation_limit=limit,
                gate_up_lora_delta=deltas.to(device, dtype),
            )  # fmt: skip
        sums = torch.tensor(gate_up).double() + torch.tensor(delta).double()
        gate = sums[:, 0].clamp(max=limit)
        expected = gate * torch.sigmoid(alpha * gate) * (sums[:, 1].clamp(-limit, limit) + 1)
        # -20 * sigmoid(-34) is 0 in fp16.
        expected = expected.to(dtype).double()
        check_close(got.cpu(), expected[:, None].expand(tokens, size))


@pytest.mark.parametrize("with_lora", [False, True])
def test_weight_on_input_is_applied_once_and_before_the_expert(device, dtype, with_lora):
    """D06"""
    layer, lora, adapter_ids = make(9, device, dtype, Shape(64, 32, 8, 1))
    layer = layer.with_(hidden_states=4 * layer.hidden_states, topk_weights=torch.full_like(layer.topk_weights, 0.25))
    options = {"lora": lora, "adapter_ids": adapter_ids} if with_lora else {}
    on_input = check(layer, **options, **layer.biases, apply_router_weight_on_input=True)
    on_output = check(layer, **options, **layer.biases)
    assert (on_input - on_output).abs().max() > 0.1 * on_output.abs().max()


@pytest.mark.parametrize("with_lora", [False, True])
def test_routed_scaling_factor_is_applied_once(device, dtype, with_lora):
    """A14: to base and adapter alike, in the forward or in the routing"""
    shape = Shape(64, 32, 16, 8)
    layer, lora, adapter_ids = make(11, device, dtype, shape)
    options = {"lora": lora, "adapter_ids": adapter_ids} if with_lora else {}
    logits = torch.randn(11, shape.experts, generator=torch.Generator().manual_seed(1)).to(device)

    def forward(route_factor, layer_factor):
        weights, ids = moelora.route(logits, shape.top_k, "sigmoid", routed_scaling_factor=route_factor)
        routed = layer.with_(topk_weights=weights, topk_ids=ids)
        return check(routed, **options, routed_scaling_factor=layer_factor)

    once = forward(1.0, 1.0)
    # Doubling changes exponents only, so these are equal to the bit.
    assert torch.equal(forward(1.0, 2.0), 2 * once)
    assert torch.equal(forward(2.0, 1.0), 2 * once)
    check_close(forward(1.0, 2.5), 2.5 * once.double(), bound=2 * torch.finfo(dtype).eps)


def test_routing_in_fp32_decides_what_is_computed(device, dtype):
    """A15: logits that are equal in bf16 still choose the larger"""
    layer = random_layer(2, Shape(64, 32, 8, 1), dtype=dtype, device=device)
    logits = torch.full((2, 8), -1.0)
    logits[:, 0], logits[:, 1] = 1.0010, 1.0020
    weights, ids = moelora.route(logits.to(device), 1)
    assert ids.flatten().tolist() == [1, 1]
    assert weights.dtype == torch.float32
    chosen = check(layer.with_(topk_weights=weights, topk_ids=ids))
    assert torch.equal(chosen, run(layer.with_(topk_weights=weights, topk_ids=torch.ones_like(ids))))


# ---- ids and rows ----


INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.mark.parametrize("tokens", [1, 7, 64, 5000])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_count_as_none(device, dtype, tokens, id_dtype):
    """B12, E09: -1, E, E+1 and the ends of the integer types"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(16, 8, 8, 4))
    bad = [-1, 8, 9, INT_MAX, INT_MIN] + ([2**32, 2**32 + 1, -(2**40)] if id_dtype == torch.int64 else [])
    ids = layer.topk_ids.to(id_dtype)
    where = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)).to(device) < 0.4
    where[0, 0] = True
    values = ints(bad, device, id_dtype)
    ids = torch.where(where, values[torch.arange(ids.numel(), device=device) % len(bad)].view(ids.shape), ids)
    expected = oracle(layer.with_(topk_ids=torch.where(where, -1, layer.topk_ids)), lora, adapter_ids)
    check_close(run(layer.with_(topk_ids=ids), lora, adapter_ids), expected)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_adapter_ids_out_of_range_count_as_none(device, dtype, id_dtype):
    """E09, B12"""
    layer, lora, _ = make(7, device, dtype)
    adapter_ids = ints([0, 3, -1, 2, INT_MAX, INT_MIN, -2], device, id_dtype)
    valid = ints([0, -1, -1, 2, -1, -1, -1], device)
    assert torch.equal(run(layer, lora, adapter_ids), run(layer, lora, valid))
    check(layer, lora, valid)


def test_an_expert_named_several_times_counts_each_time(device, dtype):
    """B13"""
    layer, lora, adapter_ids = make(2, device, dtype, Shape(64, 32, 6, 4))
    layer = layer.with_(
        topk_ids=ints([[3, 3, 3, 3], [0, 1, 2, 3]], device),
        topk_weights=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.2, 0.2, 0.1]], device=device),
    )
    got = check(layer, lora, adapter_ids)
    once = layer.with_(topk_ids=layer.topk_ids[:, :1], topk_weights=torch.ones(2, 1, device=device)).tokens([0])
    check_close(got[:1], oracle(once, lora, adapter_ids[:1]))


@pytest.mark.parametrize("ids", [-1, 8])
def test_no_local_pair_gives_zeros(device, dtype, ids):
    """C01: none at all, or all on other processes"""
    layer, lora, adapter_ids = make(8, device, dtype)
    layer = layer.with_(topk_ids=torch.full_like(layer.topk_ids, ids))
    for options in ({}, {"lora": lora, "adapter_ids": adapter_ids}):
        got = run(layer, **options, **layer.biases, num_experts=16)
        assert torch.equal(got, torch.zeros_like(layer.hidden_states))
    check(*make(8, device, dtype))


def layer_with_counts(counts, device, dtype, hidden=64, rank=8):
    """K = 1 tokens of which counts[e] go to expert e, in an order that is not sorted."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]
    shape = Shape(hidden, 32, len(counts), 1)
    layer, lora, adapter_ids = make(len(ids), device, dtype, shape, rank=rank)
    return layer.with_(topk_ids=ids[:, None].int().to(device)), lora, adapter_ids


@pytest.mark.parametrize(
    "counts", [[0, 3, 0, 0, 5, 0], [5, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 200 + [37] + [0] * 55]
)
def test_experts_without_rows(device, dtype, counts):
    """C02"""
    check(*layer_with_counts(counts, device, dtype))


@pytest.mark.parametrize("hidden", [64, 8])
@pytest.mark.parametrize("rank", [4, 8])
def test_odd_row_counts_and_short_rows(device, dtype, hidden, rank):
    """C09: groups start at any row; rows of 16 bytes; a rank whose rows are 8 bytes"""
    check(*layer_with_counts([1, 7, 3, 0, 13], device, dtype, hidden, rank))


def test_one_expert_takes_every_row(device, dtype):
    """C02: all other tiles are unused"""
    layer, lora, adapter_ids = make(300, device, dtype, Shape(64, 32, 64, 1))
    check(layer.with_(topk_ids=torch.full_like(layer.topk_ids, 63)), lora, adapter_ids)


def test_nothing_beyond_the_last_row_is_read(device, dtype):
    """B05: the rows after the input are NaN, and one expert of eight has one row"""
    layer, lora, _ = make(1, device, dtype, Shape(64, 32, 8, 1), slots=1)
    buffer = torch.full((130, 64), torch.nan, device=device, dtype=dtype)
    buffer[:1] = layer.hidden_states
    assert torch.equal(run(layer.with_(hidden_states=buffer[:1]), lora), check(layer, lora))


# ---- forms of the inputs: the same bits whatever the strides and integer types ----


def test_strided_inputs_give_the_same_bits(device, dtype):
    """C06, C10, D14, E11: slices, transposes and offsets of larger tensors"""
    tokens, shape = 9, Shape(64, 32, 8, 4)
    layer, lora, adapter_ids = make(tokens, device, dtype, shape)
    expected = run(layer, lora, adapter_ids, **layer.biases)

    def inside(tensor, dim, before, after):
        """`tensor` as a slice of one that is larger in `dim`."""
        size = list(tensor.shape)
        size[dim] += before + after
        larger = torch.randint(7, size, device=device).to(tensor.dtype)
        view = larger.narrow(dim, before, tensor.shape[dim])
        view.copy_(tensor)
        return view

    forms = {
        "hidden_states of a wider tensor": {"hidden_states": inside(layer.hidden_states, 1, 16, 8)},
        "hidden_states of a longer tensor": {"hidden_states": inside(layer.hidden_states, 0, 2, 1)},
        "w13 of a taller tensor": {"w13": inside(layer.w13, 1, 8, 8)},
        "w13 of a wider tensor": {"w13": inside(layer.w13, 2, 8, 16)},
        "w2 of a wider tensor": {"w2": inside(layer.w2, 2, 8, 8)},
        "every other expert": {"w2": layer.w2.repeat_interleave(2, 0)[::2]},
        "ids transposed": {"topk_ids": layer.topk_ids.t().contiguous().t()},
        "weights transposed": {"topk_weights": layer.topk_weights.t().contiguous().t()},
        "ids of a wider tensor": {"topk_ids": inside(layer.topk_ids, 1, 1, 3)},
        "weights of a wider tensor": {"topk_weights": inside(layer.topk_weights, 1, 3, 1)},
    }
    for name, changes in forms.items():
        assert torch.equal(run(layer.with_(**changes), lora, adapter_ids, **layer.biases), expected), name
    strided_ids = inside(adapter_ids[:, None], 1, 1, 2)[:, 0]
    assert torch.equal(run(layer, lora, strided_ids, **layer.biases), expected)


@pytest.mark.parametrize("tokens", [9, 200])
def test_int64_ids_give_the_same_bits(device, dtype, tokens):
    """A11: ids and adapter ids as torch.topk and indexing give them"""
    layer, lora, adapter_ids = make(tokens, device, dtype)
    expected = run(layer, lora, adapter_ids)
    assert torch.equal(run(layer.with_(topk_ids=layer.topk_ids.long()), lora, adapter_ids.long()), expected)


def test_bf16_weights_are_read_as_they_are(device, dtype):
    layer, lora, adapter_ids = make(9, device, dtype)
    rounded = layer.topk_weights.bfloat16()
    got = run(layer.with_(topk_weights=rounded), lora, adapter_ids)
    assert torch.equal(got, run(layer.with_(topk_weights=rounded.float()), lora, adapter_ids))


@pytest.mark.parametrize("tokens", [9, 200])
def test_packed_topk_gives_the_same_bits(device, dtype, tokens):
    """Negative weights must not touch the id, and -1 survives."""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(64, 32, 8, 4))
    weights = (layer.topk_weights - 0.7).bfloat16().float()
    assert (weights < 0).any()
    ids = layer.topk_ids.clone()
    ids[2, 1] = ids[5, 0] = -1
    layer = layer.with_(topk_weights=weights, topk_ids=ids)
    packed = ops.pack_topk(weights, ids)
    got = run(layer.with_(topk_weights=None, topk_ids=packed), lora, adapter_ids)
    assert torch.equal(got, run(layer, lora, adapter_ids))
    check(layer, lora, adapter_ids)


def test_packed_routing_feeds_the_forward(device, dtype):
    layer, lora, adapter_ids = make(9, device, dtype)
    logits = torch.randn(9, SMALL.experts, generator=torch.Generator().manual_seed(4)).to(device)
    _, packed = moelora.route(logits, SMALL.top_k, packed=True)
    weights, ids = moelora.route(logits, SMALL.top_k)
    got = run(layer.with_(topk_weights=None, topk_ids=packed), lora, adapter_ids)
    assert torch.equal(got, run(layer.with_(topk_weights=weights.bfloat16(), topk_ids=ids), lora, adapter_ids))


def test_out_is_written_and_nothing_around_it(device, dtype):
    """The buffer may be a slice of a wider one."""
    layer, lora, adapter_ids = make(9, device, dtype)
    expected = run(layer, lora, adapter_ids)
    buffer = torch.full((11, SMALL.hidden + 16), torch.nan, device=device, dtype=dtype)
    out = buffer[1:10, 8:-8]
    assert run(layer, lora, adapter_ids, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(torch.nan)
    assert buffer.isnan().all()


# ---- deltas by the caller, and the unfinished form ----


def split_lora(lora):
    """The gate_up part and the down part as two adapters."""
    parts = (lora.gate_up_a, lora.gate_up_b, None, None), (None, None, lora.down_a, lora.down_b)
    return [moelora.MoELoRA(*part, lora.scaling, lora.ranks) for part in parts]


@pytest.mark.parametrize("with_down_lora", [False, True])
def test_gate_up_delta_by_the_caller(device, dtype, with_down_lora):
    """[gate | up] whatever w13's layout, by expanded pair, instead of the lora's gate_up part"""
    layer, lora, adapter_ids = make(13, device, dtype)
    gate_up, down = split_lora(lora)
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, gate_up, adapter_ids).to(dtype)
    options = {"lora": down, "adapter_ids": adapter_ids} if with_down_lora else {}
    for layout in LAYOUTS:
        got = check(layer, **options, gate_up_lora_delta=delta, gate_up_layout=layout)
        same = oracle(layer, lora if with_down_lora else gate_up, adapter_ids, gate_up_layout=layout)
        plain = oracle(layer, lora if with_down_lora else gate_up, adapter_ids, gate_up_layout=layout, dtype=None)
        check_close(got, same, plain=plain)


@pytest.mark.parametrize("weighted", [False, True])
def test_down_delta_by_the_caller(device, dtype, weighted):
    """unweighted, or with the router weight already in it (vLLM's form)"""
    layer, lora, adapter_ids = make(13, device, dtype)
    gate_up, _ = split_lora(lora)
    delta = torch.randn(13, SMALL.top_k, SMALL.hidden, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    options = {"down_lora_delta": delta, "down_lora_delta_is_weighted": weighted, "routed_scaling_factor": 1.5}
    for extra in ({}, {"lora": gate_up, "adapter_ids": adapter_ids}):
        check(layer, **extra, **options)


def finish_by_hand(layer, unfinished, lora, adapter_ids, expert_offset=0):
    """What a caller of do_finalize=False does, in float64."""
    down, weights, rows, lora_input = unfinished
    tokens, top_k = layer.topk_ids.shape
    local = (rows >= 0).view(tokens, top_k, 1)
    y = down[rows.clamp(min=0).long()].view(tokens, top_k, -1).double()
    if lora is not None:
        y = y + down_lora_delta_reference(lora_input, layer.topk_ids, lora, adapter_ids, expert_offset=expert_offset)
    return torch.where(local, weights.double()[..., None] * y, 0.0).sum(dim=1)


@pytest.mark.parametrize("tokens", [1, 37, 200])
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_unfinished_results_can_be_finished_by_the_caller(device, dtype, tokens, with_lora, offset):
    """do_finalize=False, with pairs of other processes among them"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(64, 32, 8, 3))
    num_experts = 8 + 2 * offset
    ids = layer.topk_ids + offset
    ids[0, 0] = 0 if offset else -1
    layer = layer.with_(topk_ids=ids)
    options = {"lora": lora, "adapter_ids": adapter_ids} if with_lora else {}
    place = {"num_experts": num_experts, "expert_offset": offset}
    unfinished = run(layer, **options, **layer.biases, **place, do_finalize=False, routed_scaling_factor=3.0)
    down, weights, rows, lora_input = unfinished
    assert down.shape == (ops.max_padded_rows(tokens * 3, 8), 64)
    assert weights is layer.topk_weights
    assert (rows.dtype, rows.shape) == (torch.int32, (tokens * 3,))
    if with_lora:
        assert lora_input.shape == (tokens, 3, 32)
        assert torch.equal(lora_input[0, 0], torch.zeros_like(lora_input[0, 0]))
    else:
        assert lora_input is None
    got = finish_by_hand(layer, unfinished, lora if with_lora else None, adapter_ids, offset)
    expected = oracle(layer, **options, **layer.biases, **place)
    plain = oracle(layer, **options, **layer.biases, **place, dtype=None)
    check_close(got.to(dtype), expected, plain=plain)


def test_unfinished_with_a_delta_returns_the_activation(device, dtype):
    layer, lora, adapter_ids = make(5, device, dtype)
    gate_up, _ = split_lora(lora)
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, gate_up, adapter_ids).to(dtype)
    unfinished = run(layer, gate_up_lora_delta=delta, do_finalize=False)
    got = finish_by_hand(layer, unfinished, lora, adapter_ids)
    check_close(got.to(dtype), oracle(layer, lora, adapter_ids), plain=oracle(layer, lora, adapter_ids, dtype=None))


# ---- bits and state ----


def test_repeated_calls_give_the_same_bits(device, dtype):
    """D11, D12: nothing depends on the order in which threads finish"""
    for tokens, shape in ((1, Shape(1024, 64, 16, 8)), (8, Shape(1024, 64, 16, 8)), (64, Shape(64, 32, 8, 8))):
        layer, lora, adapter_ids = make(tokens, device, dtype, shape, rank=16)
        first = run(layer, lora, adapter_ids)
        repeats = 200 if torch.device(device).type == "cuda" else 10
        assert all(torch.equal(run(layer, lora, adapter_ids), first) for _ in range(repeats))


@pytest.mark.parametrize("do_finalize", [True, False])
def test_contents_of_the_workspace_do_not_matter(device, dtype, do_finalize):
    """B05, D10: scratch is written before it is read, whatever bytes it holds"""
    layer, lora, adapter_ids = make(37, device, dtype, Shape(64, 32, 8, 3))
    rows = ops.max_padded_rows(37 * 3, 8)
    bytes_needed = torch.ops.moelora.fused_moe_lora_workspace_bytes(
        37, 3, 8, 8, 64, 32, dtype == torch.float32, 3, 8, 2, False, 8, torch.device(device).type == "cuda"
    )
    results = []
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        outputs = {
            "out": torch.empty(37, 64, dtype=dtype, device=device),
            "down_output": torch.empty(rows, 64, dtype=dtype, device=device),
            "expanded_to_permuted": torch.empty(37 * 3, dtype=torch.int32, device=device),
            "activation_lora_input": torch.empty(37, 3, 32, dtype=dtype, device=device),
        }
        outputs = {name: buffer for name, buffer in outputs.items() if (name == "out") == do_finalize}
        for buffer in outputs.values():
            buffer.view(torch.uint8).fill_(byte)
        with torch.inference_mode():
            torch.ops.moelora.fused_moe_lora.out(
                *layer.arguments, gate_up_a=lora.gate_up_a, gate_up_b=lora.gate_up_b, down_a=lora.down_a,
                down_b=lora.down_b, scaling=lora.scaling, adapter_ids=adapter_ids, num_experts=8, **outputs,
                workspace=torch.full((bytes_needed,), byte, dtype=torch.uint8, device=device),
            )  # fmt: skip
        if not do_finalize:
            # Rows of padding are never written.
            outputs["down_output"] = outputs["down_output"][outputs["expanded_to_permuted"].long()]
        results.append(outputs)
    for outputs in results[1:]:
        for name, buffer in outputs.items():
            assert torch.equal(buffer, results[0][name]), name


def test_inputs_are_never_written(device, dtype):
    """G02, H05"""
    layer, lora, adapter_ids = make(9, device, dtype)
    tensors = [*layer.arguments, adapter_ids, lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b, lora.scaling]
    before = [tensor.clone() for tensor in tensors]
    run(layer, lora, adapter_ids)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
