"""Tests of lora_shrink for any device: a test file imports them and provides the fixtures `device` and `dtype`."""

import pytest
import torch
from op_helpers import (
    NAN,
    WILD_IDS,
    assert_guards,
    poisoned,
    random_ids,
    random_tensor,
    repeats,
    same_bits,
    sort_pairs,
)

from moelora import ops


def random_a(slots, experts, components, rank, width, device, dtype, seed=11):
    return random_tensor(slots, experts, components * rank, width, dtype=dtype, device=device, seed=seed, scale=0.3)


def slot_list(adapter_ids, num_tokens, num_slots):
    slots = [0] * num_tokens if adapter_ids is None else adapter_ids.tolist()
    return [slot if 0 <= slot < num_slots else -1 for slot in slots]


def slot_tensor(adapter_ids, num_tokens, num_slots, device):
    return torch.tensor(slot_list(adapter_ids, num_tokens, num_slots), device=device)


def oracle(x, lora_a, ids, *, rank, part="gate_up", adapter_ids=None, ranks=None, num_local, expert_offset=0):
    """v in float64 and the sum of absolute terms, both [P or T, C*R]."""
    num_tokens, top_k = ids.shape
    slots = slot_tensor(adapter_ids, num_tokens, lora_a.shape[0], x.device)
    per_token = x.dim() == 2 and lora_a.shape[1] == 1
    if per_token:
        rows, experts = x, torch.zeros(num_tokens, dtype=torch.long, device=x.device)
    else:
        rows = x[:, None].expand(-1, top_k, -1) if x.dim() == 2 else x
        rows, experts = rows.flatten(0, 1), ids.flatten().long() - expert_offset
        slots = slots.repeat_interleave(top_k)
        slots = torch.where((experts >= 0) & (experts < num_local), slots, -1)
    v = torch.zeros(rows.shape[0], lora_a.shape[2], dtype=torch.float64, device=x.device)
    size = torch.zeros_like(v)
    for slot in range(lora_a.shape[0]):
        used = rank if ranks is None else int(ranks[slot, ops.LORA_PARTS[part]].clamp(0, rank))
        inside = torch.arange(lora_a.shape[2], device=x.device) % rank < used
        if not inside.any():
            continue
        for expert in experts[slots == slot].unique().tolist():
            (mine,) = ((slots == slot) & (experts == expert)).nonzero(as_tuple=True)
            a = lora_a[slot, 0 if lora_a.shape[1] == 1 else expert].double()
            a = torch.where(inside[:, None], a, 0.0)
            v[mine] = rows[mine].double() @ a.T
            size[mine] = rows[mine].double().abs() @ a.abs().T
    return v, size


def shrink_into_poison(
    x, lora_a, ids, *, rank, part="gate_up", adapter_ids=None, ranks=None, num_local, expert_offset=0, sort=None
):
    per_token = x.dim() == 2 and lora_a.shape[1] == 1
    rows = ids.shape[0] if per_token else ids.numel()
    out, whole = poisoned(rows, lora_a.shape[2], dtype=torch.float32, device=x.device)
    maps = (None, None, None) if sort is None else (sort.permuted_to_expanded, sort.tile_expert, sort.tile_row_limit)
    torch.ops.moelora.lora_shrink.out(
        x, lora_a, ids, adapter_ids, ranks, rank, ops.LORA_PARTS[part], num_local, expert_offset, *maps, out=out
    )
    assert_guards(whole)
    return out


def assert_v(v, expected, size):
    """fp32 accuracy, and exact zeros where there is nothing to multiply."""
    assert v.shape == expected.shape
    bad = ~((v.double() - expected).abs() <= 4e-6 * size)
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} are off, first at {bad.nonzero()[0].tolist()}"


def check(x, lora_a, ids, *, sorted_too=True, **options):
    """Without and with the sort's maps; returns both."""
    expected = oracle(x, lora_a, ids, **options)
    results = [shrink_into_poison(x, lora_a, ids, **options)]
    if sorted_too:
        sort = sort_pairs(
            ids, options["num_local"], expert_offset=options.get("expert_offset", 0),
            adapter_ids=options.get("adapter_ids"), ranks=options.get("ranks"), num_slots=lora_a.shape[0],
        )  # fmt: skip
        results.append(shrink_into_poison(x, lora_a, ids, sort=sort, **options))
    for result in results:
        assert_v(result, *expected)
    return results


def cyclic_slots(num_tokens, num_slots, device, dtype=torch.int32):
    """-1, 0, 1, .., L-1, -1, .."""
    return (torch.arange(num_tokens, device=device) % (num_slots + 1) - 1).to(dtype)


# Few and many pairs, on both sides of every bound between kernels and tile shapes.
SHAPES = [  # tokens, top_k, experts, in features, rank, components, slots
    (1, 8, 16, 2048, 16, 2, 1),
    (5, 2, 4, 64, 8, 2, 3),
    (32, 8, 128, 256, 16, 2, 1),
    (33, 8, 128, 256, 16, 2, 1),
    (100, 4, 32, 1032, 16, 1, 2),
    (300, 8, 64, 136, 16, 2, 3),
    (700, 8, 64, 200, 8, 2, 4),
    (600, 8, 4, 520, 16, 2, 2),
    (1100, 8, 4, 72, 16, 2, 1),
    (1100, 8, 3, 40, 32, 2, 2),
    (1100, 4, 2, 72, 8, 1, 1),
    (1025, 6, 8, 40, 64, 2, 3),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_shrink_equals_the_oracle(shape, device, dtype):
    """E03: on both sides of each dispatch threshold, with and without the sort."""
    num_tokens, top_k, num_experts, width, rank, components, slots = shape
    x = random_tensor(num_tokens, width, dtype=dtype, device=device)
    lora_a = random_a(slots, num_experts, components, rank, width, device, dtype)
    check(
        x, lora_a, random_ids(num_tokens, top_k, num_experts, device), rank=rank, num_local=num_experts,
        adapter_ids=cyclic_slots(num_tokens, slots, device),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [3, 300])
def test_shrink_functional_form_equals_out_form(num_tokens, device, dtype):
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    lora_a = random_a(2, 8, 2, 8, 64, device, dtype)
    ids = random_ids(num_tokens, 4, 8, device)
    adapter_ids = cyclic_slots(num_tokens, 2, device)
    sort = sort_pairs(ids, 8, adapter_ids=adapter_ids, num_slots=2)
    options = {"rank": 8, "part": "gate_up", "adapter_ids": adapter_ids, "sort": sort}
    expected = shrink_into_poison(x, lora_a, ids, num_local=8, **options)
    assert same_bits(ops.lora_shrink(x, lora_a, ids, num_local_experts=8, **options), expected)
    got = torch.ops.moelora.lora_shrink(
        x, lora_a, ids, adapter_ids, None, 8, 0, 8, 0, sort.permuted_to_expanded, sort.tile_expert,
        sort.tile_row_limit,
    )  # fmt: skip
    assert same_bits(got, expected)


@pytest.mark.parametrize("num_tokens", [6, 400])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 12, 20, 24, 48, 96, 129, 256])
def test_shrink_ranks(rank, num_tokens, device, dtype):
    """D08, D09: any rank up to 256, odd ones too; one component (down, or gate and up with one A) and two."""
    ids = random_ids(num_tokens, 2, 4, device)
    x = random_tensor(num_tokens, 72, dtype=dtype, device=device)
    for components in (1, 2):
        check(x, random_a(1, 4, components, rank, 72, device, dtype), ids, rank=rank, num_local=4)
    by_pair = random_tensor(num_tokens, 2, 72, dtype=dtype, device=device, seed=3)
    check(by_pair, random_a(1, 4, 1, rank, 72, device, dtype), ids, rank=rank, part="down", num_local=4)


@pytest.mark.parametrize("num_tokens", [6, 400])
def test_shrink_keeps_gate_and_up_apart(num_tokens, device, dtype):
    """D01: gate's rank vector comes from gate's A alone, up's from up's."""
    ids = random_ids(num_tokens, 2, 4, device)
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    lora_a = random_a(1, 4, 2, 8, 64, device, dtype)
    for zeroed, other in ((slice(0, 8), slice(8, 16)), (slice(8, 16), slice(0, 8))):
        half = lora_a.clone()
        half[:, :, zeroed] = 0
        for v in check(x, half, ids, rank=8, num_local=4):
            assert same_bits(v[:, zeroed].contiguous(), torch.zeros_like(v[:, zeroed]))
            assert (v[:, other] != 0).all()


@pytest.mark.parametrize("num_tokens", [7, 400])
def test_shrink_reads_nothing_beyond_the_rank(num_tokens, device, dtype):
    """E04, E05: what an earlier adapter left in a slot's rows beyond its rank never matters."""
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    x[0, 3] = torch.inf  # inf times an unused row of zeros would be NaN
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = cyclic_slots(num_tokens, 4, device)
    ranks = torch.tensor([[3, 1], [8, 0], [0, 5], [0, 0]], dtype=torch.int32, device=device)
    lora_a = random_a(4, 4, 2, 8, 64, device, dtype)
    for slot, used in enumerate([3, 8, 0, 0]):
        lora_a.view(4, 4, 2, 8, 64)[slot, :, :, used:] = NAN
    options = {"rank": 8, "num_local": 4, "adapter_ids": adapter_ids, "ranks": ranks}
    finite = x.clone()
    finite[0, 3] = 1
    check(finite, lora_a, ids, **options)
    sort = sort_pairs(ids, 4, adapter_ids=adapter_ids, ranks=ranks, num_slots=4)
    for v in (shrink_into_poison(x, lora_a, ids, **options), shrink_into_poison(x, lora_a, ids, sort=sort, **options)):
        v = v.view(num_tokens, 2, 2, 8)
        for token, slot in enumerate(adapter_ids.tolist()):
            used = int(ranks[slot, 0]) if slot >= 0 else 0
            assert same_bits(v[token, :, :, used:].contiguous(), torch.zeros_like(v[token, :, :, used:]))


@pytest.mark.parametrize("num_tokens", [7, 400])
def test_shrink_of_a_low_rank_equals_a_small_allocation(num_tokens, device, dtype):
    """E04: rank 8 inside an allocation of 64 gives what rank 8 in an allocation of 8 gives."""
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 2, 4, device)
    small = random_a(1, 4, 2, 8, 64, device, dtype)
    large = torch.full((1, 4, 2, 64, 64), NAN, dtype=dtype, device=device)
    large[:, :, :, :8] = small.view(1, 4, 2, 8, 64)
    ranks = torch.tensor([[8, 8]], dtype=torch.int32, device=device)
    v_small = check(x, small, ids, rank=8, num_local=4)
    v_large = check(x, large.flatten(2, 3), ids, rank=64, num_local=4, ranks=ranks)
    for a, b in zip(v_small, v_large, strict=True):
        b = b.view(-1, 2, 64)
        torch.testing.assert_close(b[:, :, :8].flatten(1), a, rtol=1e-5, atol=1e-4)
        assert b[:, :, 8:].abs().max() == 0


@pytest.mark.parametrize("num_tokens", [4, 5, 300])
@pytest.mark.parametrize("pattern", [[-1, 0, -1, 0], [-1, 0, 1, 2, 3], [-1], [0, 1, 2, 3], [0, 0, 1, 0], [1]])
def test_shrink_of_mixed_batches(pattern, num_tokens, device, dtype):
    """E01, E10, D10: all mixes of base-model tokens and adapters; without one, exact zeros over NaN."""
    slots = max([*pattern, 0]) + 1
    adapter_ids = torch.tensor(pattern * num_tokens, device=device, dtype=torch.int32)[:num_tokens]
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 3, 6, device)
    lora_a = random_a(slots, 6, 2, 8, 64, device, dtype)
    together = check(x, lora_a, ids, rank=8, num_local=6, adapter_ids=adapter_ids)
    for v in together:
        v = v.view(num_tokens, 3, 16)
        assert same_bits(v[adapter_ids < 0], torch.zeros_like(v[adapter_ids < 0]))
        for token in range(min(num_tokens, 5)):
            one = slice(token, token + 1)
            alone = shrink_into_poison(x[one], lora_a, ids[one], rank=8, num_local=6, adapter_ids=adapter_ids[one])
            torch.testing.assert_close(v[token], alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 256, 1024])
def test_shrink_follows_its_slots(num_tokens, device, dtype):
    """E03: swapping two slots of different ranks, and the ids with them, changes nothing."""
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = (torch.arange(num_tokens, device=device) % 2).int()
    lora_a = random_a(2, 4, 2, 32, 64, device, dtype)
    ranks = torch.tensor([[8, 8], [32, 32]], dtype=torch.int32, device=device)
    first = check(x, lora_a, ids, rank=32, num_local=4, adapter_ids=adapter_ids, ranks=ranks)
    swapped = check(
        x, lora_a.flip(0), ids, rank=32, num_local=4, adapter_ids=1 - adapter_ids, ranks=ranks.flip(0).contiguous()
    )
    for a, b in zip(first, swapped, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_shrink_of_ids_out_of_range(num_tokens, device, dtype):
    """B12, E09, F01: such pairs get exact zeros, also with an expert offset; slots out of range count as none."""
    ids = random_ids(num_tokens, 4, 16, device)
    for i, wild in enumerate(WILD_IDS):
        ids[i % num_tokens, i % 4] = wild
    adapter_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    adapter_ids[-3:] = torch.tensor([2, 2**40, -(2**40)], device=device)
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    lora_a = random_a(2, 5, 2, 8, 64, device, dtype)
    check(x, lora_a, ids, rank=8, num_local=5, expert_offset=7, adapter_ids=adapter_ids)
    wide = torch.where(ids == -1, 2**40, ids.long())
    v = shrink_into_poison(x, lora_a, wide, rank=8, num_local=5, expert_offset=7, adapter_ids=adapter_ids)
    assert_v(v, *oracle(x, lora_a, wide, rank=8, num_local=5, expert_offset=7, adapter_ids=adapter_ids))


@pytest.mark.parametrize("num_tokens", [9, 300, 1000])
@pytest.mark.parametrize("num_local", [1, 4])
def test_shrink_with_one_a_for_all_experts(num_local, num_tokens, device, dtype):
    """J09: shared outer A gives one rank vector a token, whether its experts are local or not."""
    x = random_tensor(num_tokens, 136, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 2, 8, device)
    lora_a = random_a(3, 1, 2, 8, 136, device, dtype)
    adapter_ids = cyclic_slots(num_tokens, 3, device)
    results = check(x, lora_a, ids, rank=8, num_local=num_local, adapter_ids=adapter_ids)
    for v in results:
        assert v.shape == (num_tokens, 16)
        assert (v[adapter_ids >= 0] != 0).any(dim=1).all()
    # By pair, one A is every expert's A.
    by_pair = x[:, None].expand(-1, 2, -1).contiguous()
    for v in check(by_pair, lora_a, ids, rank=8, num_local=num_local, adapter_ids=adapter_ids):
        assert v.shape == (2 * num_tokens, 16)


def test_shrink_of_odd_group_sizes(device, dtype):
    """C09: 1, 7, 3, 0 and 13 times many rows an expert, 16-byte rows."""
    counts = [20, 140, 60, 0, 260]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    ids = ids[torch.randperm(480, generator=torch.Generator().manual_seed(2))].int().to(device)[:, None]
    x = random_tensor(480, 8, dtype=dtype, device=device)
    check(x, random_a(1, 5, 1, 4, 8, device, dtype), ids, rank=4, num_local=5)


@pytest.mark.parametrize("num_tokens", [40, 400])
def test_shrink_of_many_matrices(num_tokens, device, dtype):
    """B08: slots times experts above 1024, all in one batch."""
    ids = random_ids(num_tokens, 4, 96, device)
    adapter_ids = (torch.arange(num_tokens, device=device) * 7 % 16).int()
    x = random_tensor(num_tokens, 32, dtype=dtype, device=device)
    check(x, random_a(16, 96, 1, 4, 32, device, dtype), ids, rank=4, num_local=96, adapter_ids=adapter_ids)


@pytest.mark.parametrize("num_tokens", [6, 400])
def test_shrink_of_an_expert_named_several_times(num_tokens, device, dtype):
    """B13: every pair on its own."""
    ids = torch.full((num_tokens, 4), 3, dtype=torch.int32, device=device)
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    check(x, random_a(1, 4, 2, 8, 64, device, dtype), ids, rank=8, num_local=4)


@pytest.mark.parametrize("num_tokens", [6, 400])
def test_shrink_of_strided_inputs(num_tokens, device, dtype):
    """C10, E11, F05: slices of wider tensors and views with an offset give the results of their copies."""
    x = random_tensor(num_tokens + 3, 96, dtype=dtype, device=device)[3:, 16:80]
    ids = random_ids(2, num_tokens, num_tokens + 1, device).t() % 4
    adapter_ids = cyclic_slots(3 * num_tokens, 2, device)[num_tokens : 3 * num_tokens : 2]
    ranks = torch.tensor([[5, 5], [8, 8]], dtype=torch.int32, device=device)
    wide = random_a(4, 4, 2, 8, 80, device, dtype)
    aligned = wide[1:3, :, :, 8:72]
    assert aligned.data_ptr() % 16 == 0
    odd = random_tensor(2, 4, 16, 67, dtype=dtype, device=device, seed=4)[..., 2:66]
    options = {"rank": 8, "num_local": 4, "adapter_ids": adapter_ids, "ranks": ranks}
    for lora_a in (aligned, odd, aligned.flip(1).transpose(0, 1).contiguous().transpose(0, 1)):
        results = check(x, lora_a, ids, **options)
        copied = check(x.contiguous(), lora_a.contiguous(), ids.contiguous(), **options)
        for a, b in zip(results, copied, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 300])
def test_shrink_gives_the_same_bits_every_time(num_tokens, device, dtype):
    """D11: no order-dependent sums."""
    x = random_tensor(num_tokens, 1024, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 8, 16, device)
    lora_a = random_a(1, 16, 2, 16, 1024, device, dtype)
    sort = sort_pairs(ids, 16, num_slots=1)
    for maps in (None, sort):
        first = shrink_into_poison(x, lora_a, ids, rank=16, num_local=16, sort=maps)
        for _ in range(repeats(device)):
            assert same_bits(shrink_into_poison(x, lora_a, ids, rank=16, num_local=16, sort=maps), first)


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_shrink_rows_do_not_mix(num_tokens, device, dtype):
    """K10: the bits of a row are the same whatever the other rows hold."""
    x = random_tensor(num_tokens, 128, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = cyclic_slots(num_tokens, 2, device)
    lora_a = random_a(2, 4, 2, 8, 128, device, dtype)
    sort = sort_pairs(ids, 4, adapter_ids=adapter_ids, num_slots=2)
    options = {"rank": 8, "num_local": 4, "adapter_ids": adapter_ids}
    noisy = x.clone()
    noisy[::2] = torch.inf
    noisy[::4] = NAN
    for maps in (None, sort):
        clean = shrink_into_poison(x, lora_a, ids, sort=maps, **options).view(num_tokens, 2, -1)
        mixed = shrink_into_poison(noisy, lora_a, ids, sort=maps, **options).view(num_tokens, 2, -1)
        assert same_bits(mixed[1::2].contiguous(), clean[1::2].contiguous())


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_shrink_uses_the_ids_of_each_call(num_tokens, device, dtype):
    """E06, E07: nothing is remembered of tensors that are changed in place."""
    x = random_tensor(num_tokens, 64, dtype=dtype, device=device)
    ids = random_ids(num_tokens, 2, 4, device)
    lora_a = random_a(2, 4, 2, 8, 64, device, dtype)
    adapter_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    for slot in (0, -1, 1):
        adapter_ids.fill_(slot)
        for v in check(x, lora_a, ids, rank=8, num_local=4, adapter_ids=adapter_ids):
            assert (v != 0).any() == (slot >= 0)


def test_shrink_of_nothing(device, dtype):
    """C01, F09: no tokens, no local pair, no adapter slot."""
    lora_a = random_a(1, 4, 2, 8, 64, device, dtype)
    no_ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    no_x = torch.empty(0, 64, dtype=dtype, device=device)
    assert ops.lora_shrink(no_x, lora_a, no_ids, rank=8, part="gate_up", num_local_experts=4).shape == (0, 16)
    for num_tokens in (3, 300):
        x = torch.full((num_tokens, 64), NAN, dtype=dtype, device=device)
        ids = torch.full((num_tokens, 2), -1, dtype=torch.int32, device=device)
        for sort in (None, sort_pairs(ids, 4, num_slots=1)):
            v = shrink_into_poison(x, lora_a, ids, rank=8, num_local=4, sort=sort)
            assert same_bits(v, torch.zeros_like(v))
        ids = random_ids(num_tokens, 2, 4, device)
        v = shrink_into_poison(x, lora_a[:0], ids, rank=8, num_local=4)
        assert same_bits(v, torch.zeros_like(v))


def test_shrink_refuses_bad_arguments(device, dtype):
    """C10, D05, D09, E09, E12, K12: every message names the argument."""
    x = torch.zeros(4, 64, dtype=dtype, device=device)
    lora_a = torch.zeros(2, 4, 16, 64, dtype=dtype, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    slots = torch.zeros(4, dtype=torch.int32, device=device)

    def shrink(x=x, lora_a=lora_a, ids=ids, adapter_ids=slots, ranks=None, rank=8, part="gate_up", num_local=4, **rest):
        return ops.lora_shrink(
            x, lora_a, ids, adapter_ids=adapter_ids, ranks=ranks, rank=rank, part=part, num_local_experts=num_local,
            **rest,
        )  # fmt: skip

    shrink()
    refused = [
        ("x", {"x": x[:3]}),
        ("x", {"x": torch.zeros(4, 3, 64, dtype=dtype, device=device)}),
        ("x", {"x": torch.zeros(4, 65, dtype=dtype, device=device)[:, :64]}),
        ("x", {"x": torch.zeros(64, 4, dtype=dtype, device=device).t()}),
        ("x", {"x": torch.zeros(4 * 64 + 1, dtype=dtype, device=device)[1:].view(4, 64)}),
        ("x", {"x": x[:, :60], "lora_a": lora_a[..., :60]}),
        ("x", {"x": torch.zeros(4, 3, 64, dtype=dtype, device=device)[:, :2]}),
        ("lora_a", {"lora_a": lora_a[..., :32]}),
        ("lora_a", {"lora_a": lora_a[:, :3]}),
        ("lora_a", {"lora_a": lora_a[:, :, :12]}),
        ("lora_a", {"lora_a": lora_a.transpose(2, 3).contiguous().transpose(2, 3)}),
        ("lora_a", {"part": "down"}),
        ("lora_a", {"part": "down", "lora_a": lora_a[:, :1, :8]}),
        ("rank", {"rank": 0}),
        ("rank", {"rank": 257, "lora_a": torch.zeros(2, 4, 257, 64, dtype=dtype, device=device)}),
        ("adapter_ids", {"adapter_ids": slots[:3]}),
        ("adapter_ids", {"adapter_ids": slots.repeat(2)}),
        ("adapter_ids", {"adapter_ids": None}),
        ("ranks", {"ranks": torch.zeros(3, 2, dtype=torch.int32, device=device)}),
        ("num_local_experts", {"num_local": 0}),
        ("expert_offset", {"expert_offset": -1}),
        ("topk_ids", {"ids": torch.zeros(4, 33, dtype=torch.int32, device=device)}),
        ("part", {"part": "up"}),
    ]
    for name, change in refused:
        with pytest.raises(ValueError, match=name):
            shrink(**change)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    mistyped = [
        ("x", {"x": x.to(torch.float8_e4m3fn)}),
        ("x", {"x": x.double()}),
        ("lora_a", {"lora_a": lora_a.to(other)}),
        ("topk_ids", {"ids": ids.to(torch.int16)}),
        ("adapter_ids", {"adapter_ids": slots.float()}),
        ("ranks", {"ranks": torch.zeros(2, 2, dtype=torch.int64, device=device)}),
    ]
    for name, change in mistyped:
        with pytest.raises(TypeError, match=name):
            shrink(**change)
    sort = sort_pairs(ids, 4, num_slots=2)
    with pytest.raises(RuntimeError, match="give all three or none"):
        torch.ops.moelora.lora_shrink(x, lora_a, ids, slots, None, 8, 0, 4, 0, sort.permuted_to_expanded)
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.moelora.lora_shrink.out(x, lora_a, ids, slots, None, 8, 0, 4, 0, out=x.new_zeros(8, 16).double())
    with pytest.raises(RuntimeError, match="out"):
        wrong = torch.zeros(4, 16, device=device)
        torch.ops.moelora.lora_shrink.out(x, lora_a, ids, slots, None, 8, 0, 4, 0, out=wrong)


def test_shrink_passes_opcheck(device, dtype):
    x = random_tensor(6, 64, dtype=dtype, device=device)
    ids = random_ids(6, 2, 4, device)
    slots = cyclic_slots(6, 2, device)
    sort = sort_pairs(ids, 4, adapter_ids=slots, num_slots=2)
    maps = (sort.permuted_to_expanded, sort.tile_expert, sort.tile_row_limit)
    ranks = torch.tensor([[8, 8], [3, 3]], dtype=torch.int32, device=device)
    for experts in (4, 1):
        lora_a = random_a(2, experts, 2, 8, 64, device, dtype)
        for options in ((slots, None, 8, 0, 4, 0), (slots, ranks, 8, 0, 4, 0, *maps)):
            torch.library.opcheck(torch.ops.moelora.lora_shrink.default, (x, lora_a, ids, *options))
