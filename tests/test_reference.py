"""The oracle against the Hugging Face cases, and against a per-token loop where it has more to do."""

import itertools

import pytest
import torch
from conformance_cases import CASE_NAMES, adapter_cases, load_case, relative_error
from lora_makers import dense_updates, random_layer, random_lora

from moelora.lora import MoELoRA
from moelora.reference import (
    down_lora_delta_reference,
    gate_up_lora_delta_reference,
    max_padded_rows,
    moe_lora_reference,
    moe_sort_reference,
    pack_topk_reference,
    route_reference,
    unpack_topk_reference,
)

TOLERANCE = 1e-6  # the recorded outputs are float32 and within 6e-7 of a float64 recomputation


def run_case(case, lora=None, adapter_ids=None, **options):
    return moe_lora_reference(
        case.hidden_states,
        case.weights.w13,
        case.weights.w2,
        case.topk_weights,
        case.topk_ids,
        lora=lora,
        adapter_ids=adapter_ids,
        **(case.forward_options | options),
    )


@pytest.mark.parametrize("name", CASE_NAMES)
def test_base_output_matches_hugging_face(name):
    case = load_case(name)
    assert relative_error(run_case(case), case.expected()) < TOLERANCE


@pytest.mark.parametrize(("name", "adapter"), adapter_cases())
def test_adapter_output_matches_peft(name, adapter):
    case = load_case(name)
    assert relative_error(run_case(case, case.load_adapter(adapter)), case.expected(adapter)) < TOLERANCE


@pytest.mark.parametrize("name", CASE_NAMES)
def test_mixed_batch_matches_hugging_face(name):
    case = load_case(name)
    lora = MoELoRA.stack([case.load_adapter(adapter) for adapter in case.adapters])
    assert relative_error(run_case(case, lora, case.mixed_adapter_ids), case.expected_mixed) < TOLERANCE


@pytest.mark.parametrize("name", CASE_NAMES)
def test_routing_matches_hugging_face(name):
    case = load_case(name)
    weights, ids = route_reference(case.tensors["router_logits"], case.topk_ids.shape[1], **case.route_options)
    expected_ids, expected_weights = case.topk_ids, case.topk_weights
    if not case.info["routing"]["topk_ids_sorted_by_weight"]:
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
        expected_ids, order = expected_ids.sort(dim=1)
        expected_weights = expected_weights.gather(1, order)
    assert torch.equal(ids.long(), expected_ids)
    assert relative_error(weights, expected_weights) < TOLERANCE


# --- the layer against a loop over tokens with the adapters merged into the weights


def token_loop(layer, lora=None, adapter_ids=None, *, weigh_input=False, act=None, biases=(None, None), offset=0):
    """The layer pair by pair in float64, adapters merged into the experts' weights; gate_up layout."""
    x, w13, w2, weights, ids = (tensor.double() for tensor in layer.arguments)
    merged = {None: (w13, w2)}
    for slot in range(lora.num_slots if lora else 0):
        gate_up, down = dense_updates(lora, slot)
        merged[slot] = (w13 + gate_up, w2 + down)
    act = act or (lambda g, u: torch.nn.functional.silu(g) * u)
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        slot = int(adapter_ids[t]) if adapter_ids is not None else (0 if lora else None)
        slot_w13, slot_w2 = merged.get(slot, merged[None])
        for k in range(ids.shape[1]):
            expert = int(ids[t, k]) - offset
            if not 0 <= expert < w13.shape[0]:
                continue
            row = x[t] * weights[t, k] if weigh_input else x[t]
            gate_up = slot_w13[expert] @ row
            if biases[0] is not None:
                gate_up = gate_up + biases[0][expert].double()
            y = slot_w2[expert] @ act(*gate_up.chunk(2))
            if biases[1] is not None:
                y = y + biases[1][expert].double()
            out[t] += y if weigh_input else weights[t, k] * y
    return out


def check(layer, lora=None, adapter_ids=None, *, loop=None, **options):
    got = moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, token_loop(layer, lora, adapter_ids, **(loop or {})))


FORMS = [
    {},
    {"shared_a": True},
    {"shared_outer": True},
    {"shared_a": True, "shared_outer": True},
    {"gate_up_rank": 1, "down_rank": 5},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [[-1, 0, -1, 0, 0, 0, 0], [-1] * 7, [0] * 7])
def test_one_slot_and_tokens_without_adapter(form, ids):
    """E01, E07"""
    check(random_layer(), random_lora(**form), torch.tensor(ids))


@pytest.mark.parametrize("form", FORMS)
def test_mixed_slots_with_empty_and_unknown_ones(form):
    """E01, E03, E10, F01: slot 2 is empty, 3, 9 and -1 are no slots."""
    lora = random_lora(3, **form)
    lora.ranks = torch.tensor([[1, 3], [1, 4], [0, 0]], dtype=torch.int32)
    check(random_layer(9), lora, torch.tensor([0, 1, 2, 3, -1, 1, 0, 9, 1]))


def test_no_adapter_ids_mean_slot_0_where_there_is_one_slot():
    check(random_layer(), random_lora())
    with pytest.raises(ValueError, match="adapter_ids"):
        moe_lora_reference(*random_layer().arguments, lora=random_lora(2))


def test_slots_of_one_side_only():
    """J08"""
    full = random_lora()
    for lora in (
        MoELoRA(full.gate_up_a, full.gate_up_b, None, None, full.scaling),
        MoELoRA(None, None, full.down_a, full.down_b, full.scaling),
        MoELoRA.stack([full, None]),
    ):
        ids = torch.zeros(7, dtype=torch.int64)
        check(random_layer(), lora, ids)
    for ranks in ([[4, 0]], [[0, 4]]):
        lora = random_lora(ranks=ranks)
        check(random_layer(), lora)


@pytest.mark.parametrize("bad", [float("nan"), 1e4])
def test_rank_entries_beyond_the_rank_and_empty_slots_are_never_read(bad):
    """E04, E05"""
    ranks = [[3, 2], [0, 0]]
    ids = torch.tensor([0, 1, 0, 1, -1, 0, 0])
    clean = random_lora(2, gate_up_rank=8, down_rank=8, ranks=ranks)
    dirty = random_lora(2, gate_up_rank=8, down_rank=8, ranks=ranks, padding=bad)
    dirty.scaling[1] = bad
    layer = random_layer()
    got = moe_lora_reference(*layer.arguments, lora=dirty, adapter_ids=ids)
    assert torch.equal(got, moe_lora_reference(*layer.arguments, lora=clean, adapter_ids=ids))


@pytest.mark.parametrize("zero", ["gate_a", "up_a", "gate_b", "up_b"])
def test_gate_and_up_have_their_own_rows(zero):
    """D01"""
    lora = random_lora(gate_up_rank=4, inter=8)
    rows = {
        "gate_a": lora.gate_up_a[:, :, :4],
        "up_a": lora.gate_up_a[:, :, 4:],
        "gate_b": lora.gate_up_b[:, :, :8],
        "up_b": lora.gate_up_b[:, :, 8:],
    }
    rows[zero].zero_()
    layer = random_layer()
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora)
    gate, up = delta.chunk(2, dim=-1)
    assert gate.any() == (zero[:4] != "gate")
    assert up.any() == (zero[:2] != "up")
    check(layer, lora)


def test_local_experts_with_an_offset_and_ids_out_of_range():
    """B12, F01, F02"""
    layer = random_layer(6)
    layer.topk_ids = torch.tensor([[-1, 6], [5, 4], [7, 8], [4, -(2**31)], [2**31 - 1, 7], [3, 0]])
    lora = random_lora(2)
    lora.gate_up_b[0, 3] = 1e6  # what a -1 that wraps around would pick up
    ids = torch.tensor([1, 0, 1, 1, 0, -1])
    check(layer, lora, ids, loop={"offset": 4}, expert_offset=4, num_experts=8)
    assert not moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=ids, expert_offset=4)[5].any()


def test_an_expert_named_several_times_counts_every_time():
    """B13"""
    layer = random_layer(3, top_k=4)
    layer.topk_ids[0] = 3
    check(layer, random_lora())


def test_biases():
    biases = torch.randn(4, 16), torch.randn(4, 16)
    check(random_layer(), random_lora(), loop={"biases": biases}, w13_bias=biases[0], w2_bias=biases[1])


def test_router_weight_on_the_input_is_applied_once_before_the_expert():
    """D06"""
    layer = random_layer(top_k=1)
    layer.hidden_states *= 4
    layer.topk_weights.fill_(0.25)
    bias = torch.randn(4, 16)
    check(
        layer,
        random_lora(),
        loop={"weigh_input": True, "biases": (bias, None)},
        w13_bias=bias,
        apply_router_weight_on_input=True,
    )
    with pytest.raises(ValueError, match="top_k"):
        moe_lora_reference(*random_layer().arguments, apply_router_weight_on_input=True)


def swigluoai(g, u, alpha=1.702, limit=7.0):
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1)


@pytest.mark.parametrize(
    ("options", "act"),
    [
        ({"activation": "gelu_tanh"}, lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u),
        ({"activation": "swigluoai"}, swigluoai),
        (
            {"activation": "swigluoai", "activation_alpha": 1.3, "activation_limit": 0.5},
            lambda g, u: swigluoai(g, u, 1.3, 0.5),
        ),
    ],
)
def test_activations(options, act):
    layer = random_layer()
    layer.hidden_states *= 8
    check(layer, random_lora(), loop={"act": act}, **options)


@pytest.mark.parametrize(
    ("gate", "up", "expected_gate", "expected_up"),
    [(20, 20, 7, 7), (-20, -20, -20, -7), (20, -20, 7, -7), (0, 0, 0, 0), (11, 1, 7, 1)],
)
def test_swigluoai_clamps_the_gate_above_and_up_on_both_sides(gate, up, expected_gate, expected_up):
    """D07: the clamp comes after the delta, here 5 on the gate."""
    delta = torch.tensor([[[5.0, 0.0]]])
    got = moe_lora_reference(
        torch.ones(1, 1),
        torch.tensor([[[gate - 5.0], [up]]]),
        torch.ones(1, 1, 1),
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.int32),
        activation="swigluoai",
        gate_up_lora_delta=delta,
    )
    g = torch.tensor(float(expected_gate), dtype=torch.float64)
    torch.testing.assert_close(got[0, 0], g * torch.sigmoid(1.702 * g) * (expected_up + 1))


def test_layouts_of_w13_give_the_same_output():
    """J10"""
    layer, lora = random_layer(), random_lora()
    expected = moe_lora_reference(*layer.arguments, lora=lora)
    gate, up = layer.w13.chunk(2, dim=1)
    for layout, w13 in (
        ("up_gate", torch.cat((up, gate), dim=1)),
        ("interleaved", torch.stack((gate, up), dim=2).flatten(1, 2)),
    ):
        layer.w13 = w13
        got = moe_lora_reference(*layer.arguments, lora=lora, gate_up_layout=layout)
        torch.testing.assert_close(got, expected)


def test_routed_scaling_factor_multiplies_base_and_adapter_once():
    """A14"""
    layer, lora = random_layer(), random_lora()
    expected = 2.5 * moe_lora_reference(*layer.arguments, lora=lora)
    torch.testing.assert_close(moe_lora_reference(*layer.arguments, lora=lora, routed_scaling_factor=2.5), expected)


def test_packed_top_k_gives_what_its_parts_give():
    layer, lora = random_layer(), random_lora()
    layer.topk_weights = layer.topk_weights.bfloat16()
    layer.topk_weights[0, 0] *= -1
    layer.topk_ids[1, 1] = -1
    expected = moe_lora_reference(*layer.arguments, lora=lora)
    packed = pack_topk_reference(layer.topk_weights, layer.topk_ids)
    got = moe_lora_reference(layer.hidden_states, layer.w13, layer.w2, None, packed, lora=lora)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_deltas_of_the_caller_take_the_place_of_the_lora(weigh_input, weighted):
    """K02"""
    layer = random_layer(top_k=1 if weigh_input else 2)
    lora, ids = random_lora(2), torch.tensor([0, 1, -1, 1, 0, 5, 0])
    x = layer.hidden_states.double()
    w = layer.topk_weights[..., None].double()
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora, ids)
    rows = torch.einsum("th,tkih->tki", x, layer.w13[layer.topk_ids.long()].double())
    if weigh_input:
        delta, rows = w * delta, w * rows
    gate, up = (rows + delta).chunk(2, dim=-1)
    z = torch.nn.functional.silu(gate) * up
    down_delta = down_lora_delta_reference(z, layer.topk_ids, lora, ids)
    got = moe_lora_reference(
        *layer.arguments,
        gate_up_lora_delta=delta,
        down_lora_delta=down_delta * (1 if weigh_input or not weighted else w),
        down_lora_delta_is_weighted=weighted,
        apply_router_weight_on_input=weigh_input,
        routed_scaling_factor=1.5,
    )
    expected = 1.5 * token_loop(layer, lora, ids, weigh_input=weigh_input)
    torch.testing.assert_close(got, expected)


def test_a_delta_together_with_the_loras_own_part_is_refused():
    layer, lora = random_layer(), random_lora()
    for name, width in (("gate_up", 16), ("down", 16)):
        with pytest.raises(ValueError, match=f"{name}_lora_delta"):
            moe_lora_reference(*layer.arguments, lora=lora, **{f"{name}_lora_delta": torch.zeros(7, 2, width)})


def test_deltas_are_zero_without_adapter_or_local_expert():
    """D10"""
    layer, lora = random_layer(), random_lora(2, num_experts=2)
    ids = torch.tensor([0, -1, 1, 2, 0, 0, 1])
    for delta in (
        gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora, ids, expert_offset=1),
        down_lora_delta_reference(torch.randn(7, 2, 8), layer.topk_ids, lora, ids, expert_offset=1),
    ):
        has_adapter = (ids == 0) | (ids == 1)
        is_local = (layer.topk_ids == 1) | (layer.topk_ids == 2)
        assert torch.equal(delta.any(dim=-1), has_adapter[:, None] & is_local)


@pytest.mark.parametrize("adapter_rows", [6, 12])
def test_adapter_ids_of_another_length_are_refused(adapter_rows):
    """E12"""
    with pytest.raises(ValueError, match="adapter_ids"):
        moe_lora_reference(*random_layer(10).arguments, lora=random_lora(), adapter_ids=torch.zeros(adapter_rows))


def test_a_lora_of_other_sizes_is_refused():
    """E09"""
    for sizes in ({"num_experts": 3}, {"hidden": 24}, {"inter": 16}):
        with pytest.raises(ValueError, match="lora"):
            moe_lora_reference(*random_layer().arguments, lora=random_lora(**sizes))


def test_no_tokens():
    """F08"""
    got = moe_lora_reference(*random_layer(1).arguments, lora=random_lora())
    assert got.shape == (1, 16)
    layer = random_layer(1)
    empty = [tensor[:0] if tensor.shape[0] == 1 else tensor for tensor in layer.arguments]
    assert moe_lora_reference(*empty, lora=random_lora()).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_dtype_path_is_close_and_rounds(dtype):
    layer = random_layer(32, hidden=64, inter=32, dtype=dtype)
    lora = random_lora(hidden=64, inter=32, dtype=dtype)
    exact = moe_lora_reference(*layer.arguments, lora=lora)
    rounded = moe_lora_reference(*layer.arguments, lora=lora, dtype=None)
    single = moe_lora_reference(*layer.arguments, lora=lora, dtype=torch.float32)
    assert (rounded.dtype, single.dtype) == (dtype, torch.float32)
    epsilon = torch.finfo(dtype).eps
    assert 0 < relative_error(single, exact) < 1e-5
    assert epsilon / 100 < relative_error(rounded, exact) < 4 * epsilon


def test_unknown_names_are_refused():
    for option in ("activation", "gate_up_layout"):
        with pytest.raises(ValueError, match=option):
            moe_lora_reference(*random_layer().arguments, **{option: "swish"})


# --- routing

INF, NAN = float("inf"), float("nan")


def route_row(row, top_k, method="renormalize", **options):
    weights, ids = route_reference(torch.tensor([row]), top_k, method, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    return weights[0].tolist(), ids[0].tolist()


def test_softmax_weights_are_over_all_experts():
    """A10"""
    row = [3.0, 1, 0, -1, -2, -3, -4, -5]
    probabilities = torch.tensor(row, dtype=torch.float64).softmax(0)
    weights, ids = route_row(row, 2, "softmax")
    assert ids == [0, 1]
    assert weights == pytest.approx(probabilities[:2].tolist())
    for method in ("renormalize", "renormalize_naive"):
        weights, _ = route_row(row, 2, method)
        assert weights == pytest.approx((probabilities[:2] / probabilities[:2].sum()).tolist())


def test_the_other_methods_on_one_row():
    row = [0.5, 2.0, -1.0, 1.0]
    s = torch.tensor(row, dtype=torch.float64).sigmoid().tolist()
    assert route_row(row, 2, "topk") == ([2.0, 1.0], [1, 3])
    assert route_row(row, 1, "llama4") == ([pytest.approx(s[1])], [1])
    assert route_row(row, 2, "sigmoid") == (pytest.approx([s[1], s[3]]), [1, 3])
    total = s[1] + s[3]
    for method, options in (("sigmoid", {"renormalize": True}), ("deepseek_v3", {})):
        assert route_row(row, 2, method, **options) == (pytest.approx([s[1] / total, s[3] / total]), [1, 3])
    assert route_row(row, 2, "deepseek_v3", renormalize=False)[0] == pytest.approx([s[1], s[3]])
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    assert route_row(row, 2, "sigmoid", correction_bias=bias) == (pytest.approx([s[2], s[1]]), [2, 1])


@pytest.mark.parametrize("method", ["softmax", "renormalize", "renormalize_naive", "topk", "sigmoid"])
def test_ties_go_to_the_smaller_id(method):
    """A03"""
    assert route_row([0.0] * 384, 8, method)[1] == list(range(8))
    row = [0.0] * 16
    row[3], row[7], row[9] = 5.0, 4.0, 3.0
    row[2] = row[12] = row[14] = 2.0
    assert route_row(row, 4, method)[1] == [3, 7, 9, 2]


def test_a_small_lead_is_no_tie():
    """A04, A15: not by an index penalty, and not after rounding to bf16."""
    row = [-10.0] * 512
    row[0], row[511] = 1.0, 1.0 + 5e-5
    assert route_row(row, 1)[1] == [511]
    assert route_row([1.0010, 1.0020, 0.5], 1)[1] == [1]


@pytest.mark.parametrize("bias", [-5.0, 0.0, 5.0])
def test_a_constant_bias_changes_nothing(bias):
    """A07"""
    logits = torch.linspace(-2, 2, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(1))].tolist()
    expected = route_row(logits, 4, "sigmoid")
    assert route_row(logits, 4, "sigmoid", correction_bias=torch.full((16,), bias)) == expected


METHODS = ["softmax", "renormalize", "renormalize_naive", "deepseek_v3", "topk", "sigmoid"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("row", "finite_first"),
    [
        ([NAN] * 8, []),
        ([-INF] * 8, []),
        ([INF, 1.0, 2.0, INF, 0.0, 0.0, 0.0, 0.0], [0, 3]),
        ([-INF, -INF, 0.5, -INF, -INF, 1.5, -INF, -INF], [5, 2]),
        ([NAN, NAN, NAN, NAN, NAN, NAN, 0.5, 1.5], [7, 6]),
    ],
)
def test_bad_logits_give_distinct_ids_and_finite_weights(method, row, finite_first):
    """A01, A02, A13"""
    weights, ids = route_row(row, 4, method)
    keys_underflow = INF in row and method in ("softmax", "renormalize_naive")
    rest = [expert for expert in range(8) if expert not in finite_first]
    if INF in row and not keys_underflow:
        rest = [2, 1]
    assert ids == (finite_first + rest)[:4]
    assert all(map(torch.isfinite, torch.tensor(weights)))
    usable = sum(value == value and value != -INF for value in row)
    assert weights[usable:] == [0.0] * len(weights[usable:])


@pytest.mark.parametrize("method", ["softmax", "renormalize_naive"])
def test_probabilities_that_underflow_are_equal(method):
    assert route_row([-150.0, 0.0, -120.0, -INF], 3, method) == ([1.0, 0.0, 0.0], [1, 0, 2])
    assert route_row([-150.0, 0.0, -120.0, -INF], 3, "renormalize")[1] == [1, 2, 0]


def test_a_bad_row_leaves_the_others_alone():
    """A01"""
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    expected = route_reference(logits, 4)
    logits[2] = NAN
    got = route_reference(logits, 4)
    for row in (0, 1, 3):
        assert torch.equal(got[0][row], expected[0][row])
        assert torch.equal(got[1][row], expected[1][row])


def test_groups_limit_the_choice():
    """A08, A09, A12"""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 256, generator=generator)
    bias = torch.randn(256, generator=generator)
    _, ids = route_reference(logits, 8, "deepseek_v3", correction_bias=bias, n_group=8, topk_group=4)
    keys = logits.sigmoid() + bias
    for row in range(5):
        groups = keys[row].view(8, 32)
        scores = [group.sort().values[-2:].sum() for group in groups]
        best = sorted(range(8), key=lambda g, scores=scores: -scores[g])[:4]
        allowed = [expert for expert in range(256) if expert // 32 in best]
        assert ids[row].tolist() == sorted(allowed, key=lambda e, row=row: -keys[row, e])[:8]
    for experts, groups in ((384, 1), (256, 1)):
        logits = torch.randn(2, experts, generator=generator)
        ungrouped = route_reference(logits, 8, "deepseek_v3")
        grouped = route_reference(logits, 8, "deepseek_v3", n_group=groups, topk_group=1)
        assert torch.equal(grouped[1], ungrouped[1])
    row = [0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5]
    assert route_row(row, 2, "deepseek_v3", n_group=8, topk_group=4)[1] == [1, 3]


def test_a_row_finite_in_few_experts_stays_in_its_groups():
    """A09"""
    logits = torch.full((1, 256), -INF)
    finite = [140, 150, 180, 220, 250]
    logits[0, finite] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    _, ids = route_reference(logits, 8, "deepseek_v3", n_group=8, topk_group=4)
    assert ids[0].tolist()[:5] == finite[::-1]
    assert len(set(ids[0].tolist())) == 8
    assert all(expert // 32 in {4, 5, 6, 7} for expert in ids[0].tolist())


def test_scaling_padding_and_packing():
    """A14"""
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
    weights, ids = route_reference(logits, 2)
    scaled, _ = route_reference(logits, 2, routed_scaling_factor=2.5)
    torch.testing.assert_close(scaled, 2.5 * weights)
    valid = torch.tensor(3, dtype=torch.int32)
    padded_weights, padded_ids = route_reference(logits, 2, num_valid_tokens=valid)
    assert torch.equal(padded_ids[:3], ids[:3])
    assert padded_ids[3].tolist() == [-1, -1]
    assert padded_weights[3].tolist() == [0.0, 0.0]
    none, packed = route_reference(logits, 2, num_valid_tokens=valid, packed=True)
    assert none is None
    unpacked_weights, unpacked_ids = unpack_topk_reference(packed)
    assert torch.equal(unpacked_ids, padded_ids)
    assert torch.equal(unpacked_weights, padded_weights.bfloat16().float())


def test_packing_keeps_minus_one_and_the_sign_of_a_weight():
    weights = torch.tensor([[-0.5, 0.25], [1.0, -2.0]])
    ids = torch.tensor([[1023, -1], [0, -1]])
    packed = pack_topk_reference(weights, ids)
    assert packed.dtype == torch.int32
    assert packed[0, 0] == (1023 << 16) | 0xBF00
    unpacked_weights, unpacked_ids = unpack_topk_reference(packed)
    assert torch.equal(unpacked_weights, weights)
    assert torch.equal(unpacked_ids, ids.int())


@pytest.mark.parametrize(
    ("words", "experts", "top_k", "options"),
    [
        ("method", 4, 1, {"method": "softmax_topk"}),
        ("top_k", 4, 5, {}),
        ("top_k", 4, 2, {"method": "llama4"}),
        ("top_k", 64, 9, {"method": "deepseek_v3", "n_group": 8, "topk_group": 1}),
        ("n_group", 10, 2, {"method": "deepseek_v3", "n_group": 4, "topk_group": 1}),
        ("topk_group", 8, 2, {"method": "deepseek_v3", "n_group": 4, "topk_group": 5}),
        ("n_group", 8, 2, {"method": "sigmoid", "n_group": 4, "topk_group": 2}),
        ("renormalize", 8, 2, {"method": "softmax", "renormalize": True}),
        ("correction_bias", 8, 2, {"method": "renormalize", "correction_bias": torch.zeros(8)}),
    ],
)
def test_routing_refuses_what_it_cannot_do(words, experts, top_k, options):
    """A08, A16"""
    with pytest.raises(ValueError, match=words):
        route_reference(torch.zeros(1, experts), top_k, **options)


def test_all_experts_and_one_expert():
    """A16"""
    assert sorted(route_row([1.0, 3.0, 2.0, 0.0], 4)[1]) == [0, 1, 2, 3]
    assert route_row([1.0], 1) == ([1.0], [0])


# --- sort


@pytest.mark.parametrize("tile_rows", [1, 2, 16])
@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_sort_groups_pairs_by_expert_and_slot_stably(tile_rows, num_slots):
    generator = torch.Generator().manual_seed(tile_rows + num_slots)
    ids = torch.randint(-1, 9, (13, 3), generator=generator)  # global experts 0..7, local 2..6
    adapter_ids = torch.randint(-1, 5, (13,), generator=generator)
    ranks = torch.tensor([[1, 0], [0, 0], [2, 2]], dtype=torch.int32)[:num_slots]
    maps = moe_sort_reference(
        ids,
        adapter_ids,
        ranks,
        num_slots=num_slots,
        num_local_experts=5,
        expert_offset=2,
        tile_rows=tile_rows,
    )
    flat = ids.flatten().tolist()
    slots = [slot if 0 <= slot < num_slots and slot != 1 else num_slots for slot in adapter_ids.tolist()]
    local = [pair for pair in range(39) if 2 <= flat[pair] < 7]
    rows = [pair for pair in maps.permuted_to_expanded.tolist() if pair >= 0]
    assert rows == sorted(local, key=lambda pair: (flat[pair], slots[pair // 3], pair))
    assert maps.permuted_to_expanded.numel() == max_padded_rows(39, 5, tile_rows)
    for pair, row in enumerate(maps.expanded_to_permuted.tolist()):
        assert (row == -1) == (pair not in local)
        assert row == -1 or maps.permuted_to_expanded[row] == pair
    counts = [flat.count(expert) for expert in range(2, 7)]
    padded = [-(-count // tile_rows) * tile_rows for count in counts]
    assert maps.expert_offsets.tolist() == [sum(padded[:expert]) for expert in range(6)]
    assert maps.num_padded_rows.tolist() == [sum(padded)]
    tiles = [expert for expert in range(5) for _ in range(padded[expert] // tile_rows)]
    unused = maps.tile_expert.numel() - len(tiles)
    assert maps.tile_expert.tolist() == tiles + [-1] * unused
    limits = [sum(padded[:expert]) + counts[expert] for expert in tiles]
    assert maps.tile_row_limit.tolist() == limits + [0] * unused


def test_sort_without_adapter_ids_or_pairs():
    ids = torch.tensor([[1, 0], [0, 1]])
    maps = moe_sort_reference(ids, num_local_experts=2, tile_rows=4)
    assert maps.permuted_to_expanded.tolist() == [1, 2, -1, -1, 0, 3, -1, -1]
    empty = moe_sort_reference(torch.zeros(0, 2, dtype=torch.int32), num_local_experts=2, tile_rows=4)
    assert empty.permuted_to_expanded.numel() == 0
    assert empty.expert_offsets.tolist() == [0, 0, 0]
    assert empty.num_padded_rows.tolist() == [0]


def test_padded_rows_never_exceed_their_bound_and_reach_it():
    """B01"""
    for num_pairs in range(9):
        for experts in range(1, 5):
            for tile_rows in (1, 2, 3):
                worst = max(
                    sum(-(-split.count(expert) // tile_rows) * tile_rows for expert in range(experts))
                    for split in itertools.combinations_with_replacement(range(experts), num_pairs)
                )
                assert max_padded_rows(num_pairs, experts, tile_rows) == worst
