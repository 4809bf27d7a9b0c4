"""Tests of finalize for any device: a test file imports them and provides the fixtures `device` and `dtype`."""

import pytest
import torch
from op_helpers import (
    WILD_IDS,
    assert_guards,
    one_rounding,
    poisoned,
    random_ids,
    random_tensor,
    random_weights,
    repeats,
    same_bits,
    sort_pairs,
)

from moelora import ops


def finalize_into_poison(down, weights, maps, top_k, *, delta=None, weighted=False, factor=1.0):
    out, whole = poisoned(maps.shape[0] // top_k, down.shape[1], dtype=down.dtype, device=down.device)
    torch.ops.moelora.finalize.out(down, weights, maps, delta, top_k, weighted, factor, out=out)
    assert_guards(whole)
    return out


def oracle(down, weights, maps, top_k, *, delta=None, weighted=False, factor=1.0):
    """The float64 sum, and the sum of the absolute terms."""
    num_tokens, hidden = maps.shape[0] // top_k, down.shape[1]
    rows = maps.long().view(num_tokens, top_k)
    local = (rows >= 0)[..., None]
    values = torch.where(local, down[rows.clamp(min=0)].double(), 0.0)
    w = torch.ones(num_tokens, top_k, 1, dtype=torch.float64, device=down.device)
    if weights is not None:
        w = weights.double()[..., None]
    terms = [w * values]
    if delta is not None:
        terms.append(torch.where(local, delta.double(), 0.0) * (1.0 if weighted else w))
    terms = factor * torch.stack(terms).transpose(0, 1).reshape(num_tokens, -1, hidden)
    return terms.sum(dim=1), terms.abs().sum(dim=1)


def check(down, weights, maps, top_k, **options):
    out = finalize_into_poison(down, weights, maps, top_k, **options)
    one_rounding(out, *oracle(down, weights, maps, top_k, **options))
    return out


def inputs(num_tokens, top_k, num_experts, hidden, device, dtype, num_local=None):
    """down rows with NaN in the padding, weights, and the map."""
    ids = random_ids(num_tokens, top_k, num_experts, device)
    sort = sort_pairs(ids, num_local or num_experts)
    down = random_tensor(sort.permuted_to_expanded.shape[0], hidden, dtype=dtype, device=device, seed=1)
    down[sort.permuted_to_expanded < 0] = torch.nan
    return down, random_weights(num_tokens, top_k, device), sort.expanded_to_permuted


@pytest.mark.parametrize("mode", ["none", "unweighted", "weighted"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 8, 10, 22, 32])
def test_finalize_for_every_top_k(top_k, mode, device, dtype):
    """C12: no K has a path of its own that forgets something. Padding rows hold NaN and are not read."""
    down, weights, maps = inputs(7, top_k, 40, 72, device, dtype, num_local=36)
    delta = None if mode == "none" else random_tensor(7, top_k, 72, dtype=dtype, device=device, seed=2)
    check(down, weights, maps, top_k, delta=delta, weighted=mode == "weighted", factor=2.5)


@pytest.mark.parametrize("hidden", [8, 1032, 2880, 7168])
def test_finalize_widths(hidden, device, dtype):
    """C07: no width is rounded up to a tile."""
    down, weights, maps = inputs(5, 4, 16, hidden, device, dtype)
    delta = random_tensor(5, 4, hidden, dtype=dtype, device=device, seed=2)
    check(down, weights, maps, 4, delta=delta)


def test_finalize_functional_form_equals_out_form(device, dtype):
    down, weights, maps = inputs(5, 2, 4, 16, device, dtype)
    delta = random_tensor(5, 2, 16, dtype=dtype, device=device, seed=2)
    expected = finalize_into_poison(down, weights, maps, 2, delta=delta, weighted=True, factor=0.5)
    assert same_bits(torch.ops.moelora.finalize(down, weights, maps, delta, 2, True, 0.5), expected)
    got = ops.finalize(
        down, weights, maps, top_k=2, down_lora_delta=delta, delta_is_weighted=True, routed_scaling_factor=0.5
    )
    assert same_bits(got, expected)


def test_finalize_rounds_once(device):
    """D02: weights like 1/3 on values around 100; rounding after the weight would be seen."""
    dtype = torch.bfloat16
    down = (100 + random_tensor(512, 256, dtype=torch.float32, device=device, scale=5.0)).to(dtype)
    maps = torch.randperm(512, generator=torch.Generator().manual_seed(3)).int().to(device)
    weights = torch.full((64, 8), 1 / 3, device=device)
    out = check(down, weights, maps, 8)
    by_pair = down[maps.long()].view(64, 8, 256)
    rounded_each = (weights[..., None] * by_pair.float()).to(dtype).sum(dim=1, dtype=torch.float32).to(dtype)
    assert not torch.equal(out, rounded_each)


def test_finalize_adds_in_ascending_k(device, dtype):
    """D12: a fixed order, here the one that leaves 1 of 2^30 - 2^30 + 1 (fp16: of 2^14 * 2^16)."""
    values = torch.tensor([2.0**14, -(2.0**14), 1.0], dtype=dtype, device=device)
    down = values[:, None].expand(3, 8).contiguous()
    weights = torch.tensor([[2.0**16, 2.0**16, 1.0]], device=device)
    maps = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    assert finalize_into_poison(down, weights, maps, 3).eq(1).all()
    maps = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    weights = weights[:, [2, 0, 1]].contiguous()
    assert finalize_into_poison(down, weights, maps, 3).eq(0).all()


def test_finalize_gives_the_same_bits_every_time(device, dtype):
    """D12: no atomics."""
    down, weights, maps = inputs(64, 8, 8, 256, device, dtype)
    delta = random_tensor(64, 8, 256, dtype=dtype, device=device, seed=2)
    first = finalize_into_poison(down, weights, maps, 8, delta=delta)
    for _ in range(repeats(device)):
        assert same_bits(finalize_into_poison(down, weights, maps, 8, delta=delta), first)


def test_finalize_of_a_token_does_not_depend_on_the_others(device, dtype):
    """K10: alone and inside a batch, the same bits."""
    down, weights, maps = inputs(20, 4, 8, 64, device, dtype)
    together = finalize_into_poison(down, weights, maps, 4)
    for token in range(20):
        alone = finalize_into_poison(down, weights[token : token + 1], maps[4 * token : 4 * token + 4], 4)
        assert same_bits(alone[0], together[token])


def test_finalize_of_pairs_that_are_not_local(device, dtype):
    """B12, F01: they contribute exactly 0: neither their delta nor any row is read."""
    down = random_tensor(16, 24, dtype=dtype, device=device)
    maps = torch.tensor([3, *WILD_IDS, 16, 15, 0], dtype=torch.int32, device=device)
    weights = random_weights(4, 2, device)
    delta = random_tensor(4, 2, 24, dtype=dtype, device=device, seed=2)
    delta.flatten(0, 1)[1:6] = torch.nan
    out = finalize_into_poison(down, weights, maps, 2, delta=delta)
    inside = torch.where((maps >= 0) & (maps < 16), maps, -1)
    one_rounding(out, *oracle(down, weights, inside, 2, delta=delta))
    assert same_bits(out[1:3], torch.zeros_like(out[1:3]))


def test_finalize_of_nothing(device, dtype):
    """C01, F09: no tokens, and no local pair."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    down = torch.empty(0, 32, dtype=dtype, device=device)
    assert ops.finalize(down, torch.empty(0, 2, device=device), empty, top_k=2).shape == (0, 32)
    maps = torch.full((6,), -1, dtype=torch.int32, device=device)
    out = finalize_into_poison(down, random_weights(3, 2, device), maps, 2)
    assert same_bits(out, torch.zeros_like(out))
    down = torch.full((16, 32), torch.nan, dtype=dtype, device=device)
    out = finalize_into_poison(down, random_weights(3, 2, device), maps, 2)
    assert same_bits(out, torch.zeros_like(out))


def test_finalize_with_an_expert_named_several_times(device, dtype):
    """B13: every slot counts on its own."""
    ids = torch.tensor([[3, 3, 3, 3], [0, 1, 2, 3]], dtype=torch.int32, device=device)
    sort = sort_pairs(ids, 4)
    down = random_tensor(sort.permuted_to_expanded.shape[0], 16, dtype=dtype, device=device)
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2, device=device)
    check(down, weights, sort.expanded_to_permuted, 4)


def test_finalize_of_a_delta_of_zeros(device, dtype):
    """E08: bit for bit the result without a delta."""
    down, weights, maps = inputs(9, 4, 8, 64, device, dtype)
    zeros = torch.zeros(9, 4, 64, dtype=dtype, device=device)
    plain = finalize_into_poison(down, weights, maps, 4)
    assert same_bits(finalize_into_poison(down, weights, maps, 4, delta=zeros), plain)


def test_finalize_weights(device, dtype):
    """C10, D06: bf16, strided and absent weights."""
    down, weights, maps = inputs(9, 4, 8, 64, device, dtype)
    check(down, None, maps, 4)
    check(down, weights.bfloat16(), maps, 4)
    expected = check(down, weights, maps, 4)
    transposed = weights.t().contiguous().t()
    sliced = torch.cat([weights, torch.full_like(weights, torch.nan)], dim=1)[:, :4]
    for strided in (transposed, sliced):
        assert not strided.is_contiguous()
        assert same_bits(finalize_into_poison(down, strided, maps, 4), expected)


def test_finalize_into_a_column_slice(device, dtype):
    """C12: an out with a row stride of its own; nothing beside it is written."""
    down, weights, maps = inputs(9, 4, 8, 64, device, dtype)
    wide = torch.full((9, 96), torch.nan, dtype=dtype, device=device)
    got = ops.finalize(down, weights, maps, top_k=4, out=wide[:, 16:80])
    assert got.data_ptr() == wide[:, 16:80].data_ptr()
    assert same_bits(got, finalize_into_poison(down, weights, maps, 4))
    assert wide[:, :16].isnan().all() and wide[:, 80:].isnan().all()


@pytest.mark.parametrize(("num_tokens", "top_k"), [(8191, 8), (8192, 8), (6554, 10), (70000, 1)])
def test_finalize_of_many_tokens(num_tokens, top_k, device):
    """B10: nothing is laid out along a grid dimension that ends at 65535."""
    dtype = torch.bfloat16
    down = random_tensor(num_tokens * top_k, 8, dtype=dtype, device=device)
    maps = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(1)).int().to(device)
    check(down, random_weights(num_tokens, top_k, device), maps, top_k)


def test_finalize_refuses_bad_arguments(device, dtype):
    """C12, D14, K12: views that the kernel cannot read are refused by name."""
    down = torch.zeros(16, 64, dtype=dtype, device=device)
    maps = torch.zeros(4, dtype=torch.int32, device=device)
    weights = torch.zeros(2, 2, device=device)
    wide = torch.zeros(16, 96, dtype=dtype, device=device)
    for bad in (wide[:, :64], down[:, :60].contiguous(), down.t().contiguous().t(), down[None]):
        with pytest.raises(ValueError, match="down"):
            ops.finalize(bad, weights, maps, top_k=2)
    with pytest.raises(TypeError, match="down"):
        ops.finalize(down.double(), weights, maps, top_k=2)
    with pytest.raises(TypeError, match="expanded_to_permuted"):
        ops.finalize(down, weights, maps.long(), top_k=2)
    with pytest.raises(ValueError, match="expanded_to_permuted"):
        ops.finalize(down, weights, maps[:3], top_k=2)
    with pytest.raises(ValueError, match="topk_weights"):
        ops.finalize(down, weights[:, :1], maps, top_k=2)
    with pytest.raises(TypeError, match="topk_weights"):
        ops.finalize(down, weights.double(), maps, top_k=2)
    delta = torch.zeros(2, 2, 64, dtype=dtype, device=device)
    for bad in (delta[:1], delta.transpose(0, 1), torch.zeros(2, 2, 72, dtype=dtype, device=device)[..., :64]):
        with pytest.raises(ValueError, match="down_lora_delta"):
            ops.finalize(down, weights, maps, top_k=2, down_lora_delta=bad)
    for bad in (delta[0, :1], torch.zeros(2, 68, dtype=dtype, device=device)[:, :64], delta[0].t().contiguous().t()):
        with pytest.raises(ValueError, match="out"):
            ops.finalize(down, weights, maps, top_k=2, out=bad)
    with pytest.raises(TypeError, match="out"):
        ops.finalize(down, weights, maps, top_k=2, out=torch.zeros(2, 64, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="overlap"):
        ops.finalize(down, weights, maps, top_k=2, out=down[:2])
    with pytest.raises(ValueError, match="overlap"):
        ops.finalize(down, weights, maps, top_k=2, down_lora_delta=delta, out=delta[0])


def test_finalize_passes_opcheck(device, dtype):
    down, weights, maps = inputs(5, 2, 4, 16, device, dtype)
    delta = random_tensor(5, 2, 16, dtype=dtype, device=device, seed=2)
    for options in ((weights, maps, None, 2, False, 1.0), (None, maps, delta, 2, True, 0.5)):
        torch.library.opcheck(torch.ops.moelora.finalize.default, (down, *options))
