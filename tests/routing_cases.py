"""Tests of the routing op for any device: a test file imports them and provides the fixture `device`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moelora
from moelora.reference import route_reference

INF, NAN = float("inf"), float("nan")
FP32_MAX = torch.finfo(torch.float32).max
POISON = 0x7FFFFFFF
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A use of every method, with arguments that fit E = 128 and K = 8 (llama4: K = 1).
METHODS = {
    "softmax": {},
    "renormalize": {},
    "renormalize_naive": {},
    "deepseek_v3": {"n_group": 8, "topk_group": 4},
    "llama4": {},
    "topk": {},
    "sigmoid": {"renormalize": True},
}


def route(logits, top_k, method="renormalize", *, replay_ids=None, **options):
    """moelora.route into poisoned buffers with guard words around them: (weights, ids)."""
    options = dict(options)
    if method == "deepseek_v3":
        options.setdefault("renormalize", True)
    shape = (logits.shape[0], top_k)
    weights, guarded_weights = guarded(shape, torch.float32, NAN, logits.device)
    ids, guarded_ids = guarded(shape, torch.int32, POISON, logits.device)
    torch.ops.moelora.routing.out(
        logits, top_k, moelora.ops.ROUTING_METHODS[method], topk_weights=weights, topk_ids=ids,
        replay_ids=replay_ids, **options,
    )  # fmt: skip
    assert_guards(guarded_weights, NAN)
    assert_guards(guarded_ids, POISON)
    return weights, ids


def guarded(shape, dtype, poison, device):
    """A poisoned buffer in the middle of a larger one."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 32,), poison, dtype=dtype, device=device)
    return whole[16 : 16 + size].view(shape), whole


def assert_guards(whole, poison):
    edges = torch.cat([whole[:16], whole[-16:]])
    assert torch.equal(edges, torch.full_like(edges, poison)) or (poison != poison and edges.isnan().all())


def random_logits(num_tokens, num_experts, dtype=torch.float32, seed=0, device="cpu", scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(num_tokens, num_experts, generator=generator)).to(dtype).to(device)


def assert_valid(weights, ids, num_experts):
    """K distinct ids of 0..E-1 in each row, finite weights."""
    assert ((ids >= 0) & (ids < num_experts)).all()
    ordered = ids.sort(dim=1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert torch.isfinite(weights).all()


def assert_matches_reference(logits, top_k, method, **options):
    weights, ids = route(logits, top_k, method, **options)
    expected_weights, expected_ids = route_reference(logits, top_k, method, **options)
    assert_valid(weights, ids, logits.shape[1])
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-37)
    return weights, ids


def top_k_of(method):
    return 1 if method == "llama4" else 8


# ---- every method ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_ids_and_weights_are_those_of_the_reference(device, method, dtype):
    logits = random_logits(67, 128, dtype, device=device)
    assert_matches_reference(logits, top_k_of(method), method, routed_scaling_factor=1.5, **METHODS[method])


@pytest.mark.parametrize("method", ["deepseek_v3", "sigmoid"])
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_bias_moves_the_choice_and_not_the_weight(device, method, bias_dtype, renormalize):
    logits = random_logits(33, 128, torch.bfloat16, device=device)
    bias = random_logits(1, 128, bias_dtype, seed=1, device=device, scale=0.3)[0]
    groups = METHODS["deepseek_v3"] if method == "deepseek_v3" else {}
    options = {"renormalize": renormalize, **groups}
    weights, ids = assert_matches_reference(logits, 8, method, correction_bias=bias, **options)
    _, plain_ids = route(logits, 8, method, **options)
    assert not torch.equal(ids, plain_ids)
    if not renormalize:
        scores = torch.sigmoid(logits.float()).gather(1, ids.long())
        torch.testing.assert_close(weights, scores, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_experts,top_k", [(512, 22), (512, 10), (384, 8), (896, 16), (16, 1), (8, 2), (32, 4),
                                               (1024, 32), (33, 32), (5, 3), (60, 4)])  # fmt: skip
@pytest.mark.parametrize("method", ["softmax", "renormalize", "sigmoid"])
def test_any_number_of_experts_and_choices(device, num_experts, top_k, method):
    """K08"""
    assert_matches_reference(random_logits(9, num_experts, device=device), top_k, method)


def test_rows_descend_in_the_key(device):
    weights, _ = route(random_logits(50, 96, device=device), 12, "topk")
    assert (weights[:, 1:] <= weights[:, :-1]).all()


def test_softmax_weights_are_over_all_experts_and_renormalized_ones_over_the_chosen(device):
    """A10"""
    logits = torch.tensor([[3.0, 1, 0, -1, -2, -3, -4, -5]], device=device)
    weights, ids = route(logits, 2, "softmax")
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.softmax(logits, 1)[:, :2], rtol=1e-6, atol=0)
    assert weights.sum() < 0.95
    for method in ("renormalize", "renormalize_naive"):
        weights, ids = route(logits, 2, method)
        assert ids.tolist() == [[0, 1]]
        torch.testing.assert_close(weights, torch.softmax(logits[:, :2], 1), rtol=1e-6, atol=0)


def test_llama4_weight_is_the_sigmoid_of_the_logit(device):
    logits = random_logits(20, 16, torch.bfloat16, device=device)
    weights, ids = route(logits, 1, "llama4")
    best = logits.float().max(dim=1, keepdim=True).values
    torch.testing.assert_close(weights, torch.sigmoid(best), rtol=1e-6, atol=0)
    assert torch.equal(logits.float().gather(1, ids.long()), best)


# ---- ties and comparison ----


@pytest.mark.parametrize("method", METHODS)
def test_equal_logits_go_to_the_smallest_ids(device, method):
    """A03"""
    top_k = top_k_of(method)
    for num_experts in (384, 128, 24):
        logits = torch.zeros(1, num_experts, device=device)
        _, ids = route(logits, top_k, method, **METHODS[method])
        assert ids.tolist() == [list(range(top_k))]


@pytest.mark.parametrize("method", ["softmax", "renormalize", "deepseek_v3", "topk", "sigmoid"])
def test_a_tie_at_the_last_place_goes_to_the_smallest_id(device, method):
    """A03: K-1 clear winners and three equal scores."""
    top_k, winners = 8, [380, 3, 127, 128, 64, 255, 256]
    logits = torch.full((1, 384), -3.0, device=device)
    logits[0, winners] = torch.arange(7, 0, -1.0, device=device)
    logits[0, [300, 31, 32]] = 0.5
    _, ids = route(logits, top_k, method)
    assert ids.tolist() == [[*winners, 31]]


def test_rounded_random_logits_tie_like_the_reference(device):
    """A03: at E = 512, K = 10, one row in seven ties at the cut."""
    logits = random_logits(400, 512, torch.bfloat16, device=device, scale=1.0)
    cut = logits.float().sort(dim=1, descending=True).values[:, 9:11]
    assert (cut[:, 0] == cut[:, 1]).sum() > 20
    assert_matches_reference(logits, 10, "renormalize")
    assert_matches_reference(logits, 10, "softmax")


def test_plus_and_minus_zero_are_equal(device):
    _, ids = route(torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=device), 3, "topk")
    assert ids.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("method", ["softmax", "renormalize", "sigmoid", "llama4", "topk"])
def test_a_small_gap_is_not_a_tie(device, method):
    """A04"""
    logits = torch.full((1, 512), -10.0, device=device)
    logits[0, 0], logits[0, 511] = 1.0, 1.0 + 5e-5
    _, ids = route(logits, 1, method)
    assert ids.tolist() == [[511]]


@pytest.mark.parametrize("method", ["softmax", "renormalize", "sigmoid", "llama4", "topk"])
def test_fp32_logits_are_not_rounded_before_the_comparison(device, method):
    """A15"""
    logits = torch.full((1, 8), 0.0, device=device)
    logits[0, :2] = torch.tensor([1.0010, 1.0020])
    assert logits[0, 0].bfloat16() == logits[0, 1].bfloat16()
    weights, ids = route(logits, 1, method)
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.float32


def test_the_softmax_key_is_the_fp32_probability(device):
    """Probabilities that underflow are equal, however far apart their logits are; logits as keys stay apart."""
    logits = torch.tensor([[-150.0, 0.0, -120.0, -INF]], device=device)
    for method in ("softmax", "renormalize_naive"):
        weights, ids = route(logits, 3, method)
        assert ids.tolist() == [[1, 0, 2]]
        assert weights.tolist() == [[1.0, 0.0, 0.0]]
    _, ids = route(logits, 3, "renormalize")
    assert ids.tolist() == [[1, 2, 0]]


def test_sigmoids_that_round_to_one_are_equal(device):
    _, ids = route(torch.tensor([[1.0, 30.0, 40.0, 90.0]], device=device), 3, "sigmoid")
    assert ids.tolist() == [[1, 2, 3]]


# ---- logits that are no numbers ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "method,with_bias", [*((method, False) for method in METHODS), ("deepseek_v3", True), ("sigmoid", True)]
)
def test_nan_logits_still_give_valid_rows(device, method, with_bias, dtype):
    """A01, A13"""
    options = dict(METHODS[method])
    if with_bias:
        options["correction_bias"] = random_logits(1, 128, seed=2, device=device)[0]
    top_k = top_k_of(method)
    clean = random_logits(4, 128, dtype, device=device)
    clean_weights, clean_ids = route(clean, top_k, method, **options)
    others = [0, 1, 3]
    for bad in (slice(None), slice(0, 6)):
        logits = clean.clone()
        logits[2, bad] = NAN
        weights, ids = assert_matches_reference(logits, top_k, method, **options)
        assert torch.equal(weights[others], clean_weights[others])
        assert torch.equal(ids[others], clean_ids[others])
        if bad == slice(0, 6) and not with_bias and method != "deepseek_v3":
            assert (ids[2] >= 6).all()
            assert (weights[2] != 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_tokens", [1, 3, 513])
@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_rows_without_a_number_are_written_in_full(device, method, num_tokens, value):
    """A13"""
    logits = torch.full((num_tokens, 384), value, device=device)
    top_k = top_k_of(method)
    weights, ids = route(logits, top_k, method, **METHODS[method])
    assert_valid(weights, ids, 384)
    assert ids.tolist() == [list(range(top_k))] * num_tokens
    if value != INF:
        assert (weights == 0).all()


def test_infinite_logits_count_as_the_largest_number(device):
    """A02"""
    logits = torch.tensor([[INF, 1, 2, INF, 0, 0, 0, 0]], device=device)
    for method in ("softmax", "renormalize_naive"):
        weights, ids = route(logits, 4, method)
        assert ids.tolist() == [[0, 3, 1, 2]]
        assert weights.tolist() == [[0.5, 0.5, 0, 0]]
    weights, ids = route(logits, 4, "renormalize")
    assert ids.tolist() == [[0, 3, 2, 1]]
    assert weights.tolist() == [[0.5, 0.5, 0, 0]]
    weights, ids = route(logits, 4, "topk")
    assert ids.tolist() == [[0, 3, 2, 1]]
    assert weights.tolist() == [[FP32_MAX, FP32_MAX, 2, 1]]
    weights, ids = route(logits, 4, "sigmoid")
    assert ids.tolist() == [[0, 3, 2, 1]]
    assert weights[0, :2].tolist() == [1, 1]


@pytest.mark.parametrize("method", [method for method in METHODS if method != "llama4"])
def test_fewer_finite_logits_than_choices(device, method):
    """A02: -inf everywhere except at two experts; the rest is filled in ascending order with weight 0."""
    logits = torch.full((1, 8), -INF, device=device)
    logits[0, 6], logits[0, 2] = 1.0, 0.5
    weights, ids = route(logits, 4, method)
    assert ids.tolist() == [[6, 2, 0, 1]]
    assert (weights[0, :2] > 0).all()
    assert weights[0, 2:].tolist() == [0, 0]


def test_scaled_weights_stay_finite(device):
    weights, _ = route(torch.tensor([[INF, 0.0]], device=device), 1, "topk", routed_scaling_factor=2.5)
    assert weights.tolist() == [[FP32_MAX]]
    logits = torch.tensor([[INF, 0.0]], device=device)
    _, words = moelora.ops.routing(logits, 1, "topk", packed=True)
    assert torch.isfinite(moelora.ops.unpack_topk(words)[0]).all()


# ---- every T by the same rules ----


@pytest.mark.parametrize(
    "method,num_experts",
    [*(("softmax", num_experts) for num_experts in (5, 60, 64, 96, 160, 384, 512)), ("deepseek_v3", 64)],
)
def test_a_row_does_not_depend_on_the_number_of_tokens(device, method, num_experts):
    """A05, K10"""
    top_k = min(8, num_experts)
    logits = random_logits(70_000, num_experts, torch.bfloat16, device=device)
    alone = route(logits[:1], top_k, method)
    last = route(logits[-1:], top_k, method)
    for num_tokens in (16, 256, 4096, 70_000):
        weights, ids = route(logits[:num_tokens], top_k, method)
        assert torch.equal(weights[:1], alone[0])
        assert torch.equal(ids[:1], alone[1])
    assert torch.equal(weights[-1:], last[0])
    assert torch.equal(ids[-1:], last[1])
    assert_valid(weights, ids, num_experts)


def test_no_tokens(device):
    weights, ids = moelora.route(torch.empty(0, 16, device=device), 4)
    assert weights.shape == ids.shape == (0, 4)


# ---- groups ----


@pytest.mark.parametrize("num_experts,n_group,topk_group,top_k", [
    (384, 1, 1, 8), (256, 1, 1, 8), (256, 16, 4, 8), (256, 8, 4, 8), (64, 8, 1, 8), (8, 8, 4, 2), (60, 5, 2, 8),
    (512, 64, 7, 16), (1024, 1024, 40, 32), (256, 256, 256, 8), (96, 3, 2, 32),
])  # fmt: skip
def test_groups_limit_the_choice(device, num_experts, n_group, topk_group, top_k):
    """A08, A12"""
    logits = random_logits(31, num_experts, device=device)
    bias = random_logits(1, num_experts, seed=1, device=device, scale=0.1)[0]
    options = {"correction_bias": bias, "n_group": n_group, "topk_group": topk_group}
    _, ids = assert_matches_reference(logits, top_k, "deepseek_v3", **options)
    groups = ids // (num_experts // n_group)
    assert max(len(set(row)) for row in groups.tolist()) <= topk_group


def test_a_group_of_one_expert_scores_its_one_key(device):
    """A12"""
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.0, 2.0, 3.0, -1.0, -2.0]], device=device)
    bias = torch.zeros(8, device=device)
    _, ids = route(logits, 2, "deepseek_v3", correction_bias=bias, n_group=8, topk_group=4)
    assert ids.tolist() == [[1, 3]]


def test_a_groups_score_is_the_sum_of_its_two_best(device):
    logits = torch.full((1, 8), -9.0, device=device)
    # Sigmoid + bias: group 0 has the best expert, group 1 the two best together.
    bias = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.8, 0.7, 0.0, 0.0], device=device)
    _, ids = route(logits, 2, "deepseek_v3", correction_bias=bias, n_group=2, topk_group=1)
    assert ids.tolist() == [[4, 5]]


def test_equal_groups_go_to_the_smaller_one(device):
    _, ids = route(torch.ones(1, 32, device=device), 8, "deepseek_v3", n_group=8, topk_group=3)
    assert ids.tolist() == [list(range(8))]


def test_no_id_comes_from_a_group_that_was_not_chosen(device):
    """A09: fewer finite experts than K, all in groups 4..7."""
    finite = [128, 170, 200, 201, 255]
    logits = torch.full((1, 256), -INF, device=device)
    logits[0, finite] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=device)
    weights, ids = route(logits, 8, "deepseek_v3", n_group=8, topk_group=4)
    assert_valid(weights, ids, 256)
    assert ids.tolist() == [[255, 201, 200, 170, 128, 129, 130, 131]]
    assert (weights[0, :5] > 0).all()
    assert weights[0, 5:].tolist() == [0, 0, 0]


def test_experts_masked_by_the_bias_get_weight_zero(device):
    bias = torch.full((16,), -INF, device=device)
    bias[[3, 7, 9]] = 0.0
    weights, ids = route(random_logits(5, 16, device=device), 5, "deepseek_v3", correction_bias=bias)
    assert (ids[:, 3:] == torch.tensor([0, 1], device=device)).all()
    assert (weights[:, 3:] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(5, device=device))


@pytest.mark.parametrize("value", [-5.0, 5.0])
def test_a_constant_bias_changes_nothing(device, value):
    """A07"""
    logits = torch.linspace(-2, 2, 16, device=device)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    logits = logits[None]
    for method in ("sigmoid", "deepseek_v3"):
        expected = route(logits, 4, method, correction_bias=torch.zeros(16, device=device))
        given = route(logits, 4, method, correction_bias=torch.full((16,), value, device=device))
        assert torch.equal(given[0], expected[0])
        assert torch.equal(given[1], expected[1])


# ---- the other outputs and inputs ----


@pytest.mark.parametrize("method", METHODS)
def test_the_scaling_factor_multiplies_the_weights_once(device, method):
    """A14"""
    logits = random_logits(11, 64, device=device)
    groups = METHODS[method]
    weights, ids = route(logits, top_k_of(method), method, **groups)
    scaled_weights, scaled_ids = route(logits, top_k_of(method), method, routed_scaling_factor=2.5, **groups)
    assert torch.equal(scaled_ids, ids)
    assert torch.equal(scaled_weights, weights * 2.5)


@pytest.mark.parametrize("num_valid", [-3, 0, 1, 5, 8, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_from_num_valid_tokens_on_name_no_expert(device, num_valid, packed):
    logits = random_logits(8, 32, device=device)
    count = torch.tensor(num_valid, dtype=torch.int32, device=device)
    all_weights, all_ids = moelora.route(logits, 4)
    weights, ids = moelora.route(logits, 4, num_valid_tokens=count, packed=packed)
    if packed:
        assert weights is None
        assert (ids[max(num_valid, 0) :] == -65536).all()
        all_ids = moelora.ops.pack_topk(all_weights, all_ids)
    else:
        assert (ids[max(num_valid, 0) :] == -1).all()
        assert (weights[max(num_valid, 0) :] == 0).all()
        assert torch.equal(weights[: max(num_valid, 0)], all_weights[: max(num_valid, 0)])
    assert torch.equal(ids[: max(num_valid, 0)], all_ids[: max(num_valid, 0)])


@pytest.mark.parametrize("method", METHODS)
def test_packed_is_the_packed_form_of_ids_and_weights(device, method):
    logits = random_logits(37, 256, torch.bfloat16, device=device)
    weights, ids = route(logits, top_k_of(method), method, **METHODS[method])
    empty, words = moelora.route(logits, top_k_of(method), method, **METHODS[method], packed=True)
    assert empty is None
    bits = weights.bfloat16().view(torch.int16).int() & 0xFFFF
    assert torch.equal(words, (ids << 16) | bits)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("packed", [False, True])
def test_routing_replay_receives_the_chosen_ids(device, dtype, packed):
    logits = random_logits(9, 512, device=device)
    replay, whole = guarded((9, 6), dtype, -7, device)
    count = torch.tensor([7], dtype=torch.int32, device=device)
    _, ids = moelora.ops.routing(logits, 6, num_valid_tokens=count, packed=packed, replay_ids=replay)
    assert_guards(whole, -7)
    assert torch.equal(replay.int(), ids >> 16 if packed else ids)
    assert (replay[7:] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_strides_are_followed(device, dtype):
    wide = random_logits(21, 200, dtype, device=device)
    for logits in (wide[:, 3:100], wide[::2, :97], wide[:1, :64].expand(5, 64)):
        weights, ids = route(logits, 7, "softmax")
        expected_weights, expected_ids = route(logits.contiguous(), 7, "softmax")
        assert torch.equal(weights, expected_weights)
        assert torch.equal(ids, expected_ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_matches_the_reference(device, data):
    num_experts = data.draw(st.integers(1, 1024))
    method = data.draw(st.sampled_from(sorted(METHODS)))
    options = {}
    reachable = num_experts
    if method == "deepseek_v3":
        n_group = data.draw(st.sampled_from([g for g in range(1, num_experts + 1) if num_experts % g == 0]))
        topk_group = data.draw(st.integers(1, n_group))
        options = {"n_group": n_group, "topk_group": topk_group}
        reachable = topk_group * (num_experts // n_group)
    if method in ("deepseek_v3", "sigmoid"):
        options["renormalize"] = data.draw(st.booleans())
    top_k = 1 if method == "llama4" else data.draw(st.integers(1, min(32, reachable)))
    # Few distinct values, so that ties are common.
    dtype = data.draw(st.sampled_from(DTYPES))
    logits = random_logits(data.draw(st.integers(0, 20)), num_experts, seed=data.draw(st.integers(0, 99)))
    logits = (logits * 8).round().div(8).to(dtype).to(device)
    assert_matches_reference(logits, top_k, method, **options)


# ---- refusals ----


@pytest.mark.parametrize("top_k,num_experts", [(5, 4), (0, 4), (-1, 4), (33, 64)])
def test_more_choices_than_experts_or_than_the_limit_are_refused(device, top_k, num_experts):
    """A16"""
    with pytest.raises(ValueError, match="top_k"):
        moelora.route(torch.zeros(2, num_experts, device=device), top_k)


@pytest.mark.parametrize("num_experts,top_k", [(4, 4), (1, 1), (32, 32)])
def test_all_experts_may_be_chosen(device, num_experts, top_k):
    """A16"""
    for method in ("softmax", "renormalize", "topk", "sigmoid", "deepseek_v3"):
        assert_matches_reference(random_logits(3, num_experts, device=device), top_k, method)


def test_shapes_out_of_range_are_refused_for_every_t(device):
    """A05"""
    for num_tokens in (0, 1, 5000):
        with pytest.raises(ValueError, match=r"router_logits.*1024"):
            moelora.route(torch.zeros(num_tokens, 1025, device=device), 2)
        with pytest.raises(ValueError, match="router_logits"):
            moelora.route(torch.zeros(num_tokens, 0, device=device), 1)
        with pytest.raises(ValueError, match="top_k"):
            moelora.route(torch.zeros(num_tokens, 4, device=device), 5)


@pytest.mark.parametrize("options,name", [
    ({"n_group": 3, "topk_group": 1}, "n_group"),
    ({"n_group": 0, "topk_group": 1}, "n_group"),
    ({"n_group": -8, "topk_group": 1}, "n_group"),
    ({"n_group": 8, "topk_group": 0}, "topk_group"),
    ({"n_group": 8, "topk_group": 9}, "topk_group"),
    ({"n_group": 8, "topk_group": 1, "top_k": 9}, "top_k"),
])  # fmt: skip
def test_groups_that_do_not_work_out_are_refused(device, options, name):
    """A08"""
    top_k = options.pop("top_k", 2)
    with pytest.raises(ValueError, match=name):
        moelora.route(torch.zeros(1, 64, device=device), top_k, "deepseek_v3", **options)


@pytest.mark.parametrize("method", ["softmax", "renormalize", "renormalize_naive", "llama4", "topk"])
@pytest.mark.parametrize("option", ["renormalize", "correction_bias", "n_group", "topk_group"])
def test_options_without_a_use_are_refused(device, method, option):
    value = torch.zeros(64, device=device) if option == "correction_bias" else True if option == "renormalize" else 2
    for call in (moelora.route, moelora.ops.routing):
        with pytest.raises(ValueError, match=option):
            call(torch.zeros(1, 64, device=device), 1, method, **{option: value})


def test_unknown_methods_are_refused(device):
    logits = torch.zeros(1, 8, device=device)
    with pytest.raises(ValueError, match=r"method.*'best'"):
        moelora.route(logits, 2, "best")
    with pytest.raises(RuntimeError, match="method"):
        torch.ops.moelora.routing(logits, 2, 7)
    with pytest.raises(ValueError, match=r"top_k.*llama4"):
        moelora.route(logits, 2, "llama4")


def test_wrong_tensors_are_refused_by_name(device):
    """A11"""
    logits = torch.zeros(2, 8, device=device)
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(TypeError, match="router_logits"):
            moelora.route(logits.to(dtype), 2)
    with pytest.raises(ValueError, match=r"router_logits"):
        moelora.route(logits[0], 2)
    with pytest.raises(ValueError, match=r"router_logits.*contiguous"):
        moelora.route(torch.zeros(8, 2, device=device).t(), 2)
    with pytest.raises(TypeError, match="router_logits"):
        moelora.route([[1.0, 2.0]], 1)
    with pytest.raises(ValueError, match=r"correction_bias.*\[8\]"):
        moelora.route(logits, 2, "sigmoid", correction_bias=torch.zeros(7, device=device))
    with pytest.raises(TypeError, match="correction_bias"):
        moelora.route(logits, 2, "sigmoid", correction_bias=torch.zeros(8, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match=r"num_valid_tokens.*int64"):
        moelora.route(logits, 2, num_valid_tokens=torch.tensor(1, device=device))
    with pytest.raises(ValueError, match="num_valid_tokens"):
        moelora.route(logits, 2, num_valid_tokens=torch.ones(2, dtype=torch.int32, device=device))
    for factor in (INF, NAN, 1e300):
        with pytest.raises(ValueError, match="routed_scaling_factor"):
            moelora.route(logits, 2, routed_scaling_factor=factor)


@pytest.mark.parametrize("name,shape,dtype,match", [
    ("topk_ids", (2, 2), torch.int64, "type error: topk_ids.*int64"),
    ("topk_ids", (2, 3), torch.int32, r"value error: topk_ids.*\[2, 3\]"),
    ("topk_weights", (2, 2), torch.bfloat16, "type error: topk_weights"),
    ("topk_weights", (0,), torch.float32, "value error: topk_weights"),
    ("replay_ids", (2, 2), torch.int64, "type error: replay_ids"),
    ("replay_ids", (2, 1), torch.int32, "value error: replay_ids"),
])  # fmt: skip
def test_wrong_output_buffers_are_refused_by_name(device, name, shape, dtype, match):
    """A11"""
    buffers = {"topk_weights": torch.zeros(2, 2, device=device)}
    buffers["topk_ids"] = torch.zeros(2, 2, dtype=torch.int32, device=device)
    buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(RuntimeError, match=match):
        torch.ops.moelora.routing.out(torch.zeros(2, 8, device=device), 2, 1, **buffers)
    buffers["topk_ids"] = torch.zeros(2, 4, dtype=torch.int32, device=device)[:, ::2]
    with pytest.raises(RuntimeError, match=r"topk_ids.*contiguous"):
        torch.ops.moelora.routing.out(torch.zeros(2, 8, device=device), 2, 1, **buffers)


def test_outputs_over_the_inputs_bytes_are_refused(device):
    logits = torch.zeros(2, 8, device=device)
    ids = torch.zeros(2, 2, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"topk_weights.*router_logits"):
        torch.ops.moelora.routing.out(logits, 2, 1, topk_weights=logits.view(-1)[:4].view(2, 2), topk_ids=ids)
