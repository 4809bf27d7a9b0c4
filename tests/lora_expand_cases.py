"""Tests of lora_expand for any device: a test file imports them and provides the fixtures `device` and `dtype`."""

import pytest
import torch
from lora_shrink_cases import cyclic_slots, slot_tensor
from op_helpers import (
    NAN,
    UNIT_ROUNDOFF,
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


def random_b(slots, experts, width, rank, device, dtype, seed=21):
    return random_tensor(slots, experts, width, rank, dtype=dtype, device=device, seed=seed)


def random_v(rows, columns, device, seed=22):
    return random_tensor(rows, columns, dtype=torch.float32, device=device, seed=seed)


def random_scaling(slots, device):
    return 0.5 + torch.rand(slots, 3, generator=torch.Generator().manual_seed(23)).to(device)


def oracle(
    v, lora_b, ids, *, part="gate_up", adapter_ids=None, ranks=None, scaling=None, row_weights=None, num_local,
    expert_offset=0,
):  # fmt: skip
    """delta in float64 and the sum of absolute terms, both [T, K, N]."""
    num_tokens, top_k = ids.shape
    slots, _, width, rank = lora_b.shape
    of_pair = v if v.shape[0] == ids.numel() else v.repeat_interleave(top_k, dim=0)
    gate_v, up_v = of_pair[:, :rank].double(), of_pair[:, -rank:].double()
    experts = ids.flatten().long() - expert_offset
    slot_of = slot_tensor(adapter_ids, num_tokens, slots, v.device).repeat_interleave(top_k)
    slot_of = torch.where((experts >= 0) & (experts < num_local), slot_of, -1)
    delta = torch.zeros(num_tokens * top_k, width, dtype=torch.float64, device=v.device)
    size = torch.zeros_like(delta)
    halves = ((slice(0, width), gate_v, 2),)
    if part == "gate_up":
        halves = ((slice(0, width // 2), gate_v, 0), (slice(width // 2, width), up_v, 1))
    for slot in range(slots):
        used = rank if ranks is None else int(ranks[slot, ops.LORA_PARTS[part]].clamp(0, rank))
        for expert in experts[slot_of == slot].unique().tolist() if used else []:
            (mine,) = ((slot_of == slot) & (experts == expert)).nonzero(as_tuple=True)
            b = lora_b[slot, 0 if lora_b.shape[1] == 1 else expert, :, :used].double()
            for columns, vectors, component in halves:
                scale = 1.0 if scaling is None else scaling[slot, component].double()
                delta[mine, columns] = scale * (vectors[mine, :used] @ b[columns].T)
                size[mine, columns] = scale * (vectors[mine, :used].abs() @ b[columns].abs().T)
    if row_weights is not None:
        weights = row_weights.double().view(-1, 1)
        delta, size = delta * weights, size * weights
    return delta.view(num_tokens, top_k, width), size.view(num_tokens, top_k, width)


def expand_into_poison(
    v, lora_b, ids, *, part="gate_up", adapter_ids=None, ranks=None, scaling=None, row_weights=None, num_local,
    expert_offset=0, sort=None,
):  # fmt: skip
    out, whole = poisoned(*ids.shape, lora_b.shape[2], dtype=lora_b.dtype, device=v.device)
    maps = (None, None, None) if sort is None else (sort.permuted_to_expanded, sort.tile_expert, sort.tile_row_limit)
    torch.ops.moelora.lora_expand.out(
        v, lora_b, ids, adapter_ids, ranks, scaling, row_weights, ops.LORA_PARTS[part], num_local, expert_offset,
        *maps, out=out,
    )  # fmt: skip
    assert_guards(whole)
    return out


def check(v, lora_b, ids, **options):
    """Without and with the sort's maps; returns both."""
    expected, size = oracle(v, lora_b, ids, **options)
    sort = sort_pairs(
        ids, options["num_local"], expert_offset=options.get("expert_offset", 0),
        adapter_ids=options.get("adapter_ids"), ranks=options.get("ranks"), num_slots=lora_b.shape[0],
    )  # fmt: skip
    results = [expand_into_poison(v, lora_b, ids, sort=maps, **options) for maps in (None, sort)]
    for result in results:
        one_rounding(result, expected, size)
        nothing = size.sum(dim=-1) == 0
        assert same_bits(result[nothing], torch.zeros_like(result[nothing]))
    return results


# Few and many pairs, on both sides of every bound between kernels and tile shapes.
SHAPES = [  # tokens, top_k, experts, width, rank, v columns, slots
    (1, 8, 16, 1536, 16, 32, 1),
    (5, 2, 4, 64, 8, 8, 3),
    (64, 8, 16, 208, 16, 32, 2),
    (65, 8, 16, 208, 16, 32, 2),
    (400, 4, 32, 720, 16, 16, 1),
    (300, 4, 5, 1168, 32, 64, 4),
    (257, 6, 8, 96, 64, 128, 2),
    (2200, 1, 4, 2080, 8, 16, 1),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_expand_equals_the_oracle(shape, device, dtype):
    """E03: on both sides of each dispatch threshold, with and without the sort; part columns of any multiple of 8."""
    num_tokens, top_k, num_experts, width, rank, columns, slots = shape
    ids = random_ids(num_tokens, top_k, num_experts, device)
    check(
        random_v(num_tokens * top_k, columns, device), random_b(slots, num_experts, width, rank, device, dtype), ids,
        num_local=num_experts, adapter_ids=cyclic_slots(num_tokens, slots, device),
        scaling=random_scaling(slots, device),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 2, 4, 72, 8), (300, 4, 8, 1032, 16), (150, 8, 16, 520, 40)])
def test_expand_of_the_down_part(shape, device, dtype):
    num_tokens, top_k, num_experts, width, rank = shape
    ids = random_ids(num_tokens, top_k, num_experts, device)
    check(
        random_v(num_tokens * top_k, rank, device), random_b(2, num_experts, width, rank, device, dtype), ids,
        part="down", num_local=num_experts, adapter_ids=cyclic_slots(num_tokens, 2, device),
        scaling=random_scaling(2, device),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [3, 300])
def test_expand_functional_form_equals_out_form(num_tokens, device, dtype):
    ids = random_ids(num_tokens, 4, 8, device)
    adapter_ids = cyclic_slots(num_tokens, 2, device)
    v, lora_b = random_v(num_tokens * 4, 16, device), random_b(2, 8, 48, 8, device, dtype)
    scaling, weights = random_scaling(2, device), random_weights(num_tokens, 4, device)
    sort = sort_pairs(ids, 8, adapter_ids=adapter_ids, num_slots=2)
    options = {"part": "gate_up", "adapter_ids": adapter_ids, "scaling": scaling, "row_weights": weights, "sort": sort}
    expected = expand_into_poison(v, lora_b, ids, num_local=8, **options)
    assert same_bits(ops.lora_expand(v, lora_b, ids, num_local_experts=8, **options), expected)
    got = torch.ops.moelora.lora_expand(
        v, lora_b, ids, adapter_ids, None, scaling, weights, 0, 8, 0, sort.permuted_to_expanded, sort.tile_expert,
        sort.tile_row_limit,
    )  # fmt: skip
    assert same_bits(got, expected)


@pytest.mark.parametrize("num_tokens", [6, 400])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 12, 20, 24, 48, 96, 129, 256])
def test_expand_ranks(rank, num_tokens, device, dtype):
    """D08, D09: any rank up to 256; rows of B of 2 to 512 bytes."""
    ids = random_ids(num_tokens, 2, 4, device)
    for components in (1, 2):
        v = random_v(num_tokens * 2, components * rank, device)
        check(v, random_b(1, 4, 80, rank, device, dtype), ids, num_local=4)
    check(
        random_v(num_tokens * 2, rank, device), random_b(1, 4, 40, rank, device, dtype), ids, part="down", num_local=4
    )


@pytest.mark.parametrize("num_tokens", [6, 400])
def test_expand_keeps_gate_and_up_apart(num_tokens, device, dtype):
    """D01: gate columns see gate's vector and scale only; with swapped vectors the result is another."""
    ids = random_ids(num_tokens, 2, 4, device)
    lora_b = random_b(1, 4, 64, 8, device, dtype)
    scaling = torch.tensor([[0.5, 4.0, NAN]], device=device)
    v = random_v(num_tokens * 2, 16, device)
    straight = check(v, lora_b, ids, num_local=4, scaling=scaling)
    for zeroed, half in ((slice(0, 8), slice(0, 32)), (slice(8, 16), slice(32, 64))):
        partial = v.clone()
        partial[:, zeroed] = 0
        for delta in check(partial, lora_b, ids, num_local=4, scaling=scaling):
            assert delta[..., half].abs().max() == 0
            assert (delta.abs().sum(dim=-1) > 0).all()
    swapped = check(v.roll(8, dims=1), lora_b, ids, num_local=4, scaling=scaling)
    for a, b in zip(straight, swapped, strict=True):
        assert (a.double() - b.double()).norm() > a.double().norm()


@pytest.mark.parametrize("num_tokens", [7, 400])
def test_expand_multiplies_nothing_beyond_the_rank(num_tokens, device, dtype):
    """E04, E05: NaN in B's columns and in v beyond the slot's rank never matters."""
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = cyclic_slots(num_tokens, 5, device)
    ranks = torch.tensor([[3, 1], [16, 0], [0, 5], [0, 0], [9, 9]], dtype=torch.int32, device=device)
    lora_b = random_b(5, 4, 64, 16, device, dtype)
    v = random_v(num_tokens * 2, 32, device).view(num_tokens, 2, 2, 16)
    for slot in range(5):
        used = int(ranks[slot, 0])
        lora_b[slot, :, :, used:] = NAN
        v[adapter_ids == slot, :, :, used:] = NAN
    v[adapter_ids < 0] = NAN
    check(v.view(-1, 32), lora_b, ids, num_local=4, adapter_ids=adapter_ids, ranks=ranks)


@pytest.mark.parametrize("num_tokens", [4, 5, 300])
@pytest.mark.parametrize("pattern", [[-1, 0, -1, 0], [-1, 0, 1, 2, 3], [-1], [0, 1, 2, 3], [0, 0, 1, 0], [1]])
def test_expand_of_mixed_batches(pattern, num_tokens, device, dtype):
    """E01, E10, D10: every element is written over NaN; without an adapter, exact zeros."""
    slots = max([*pattern, 0]) + 1
    adapter_ids = torch.tensor(pattern * num_tokens, device=device, dtype=torch.int32)[:num_tokens]
    ids = random_ids(num_tokens, 3, 6, device)
    v, lora_b = random_v(num_tokens * 3, 16, device), random_b(slots, 6, 80, 8, device, dtype)
    for delta in check(v, lora_b, ids, num_local=6, adapter_ids=adapter_ids):
        for token in range(min(num_tokens, 5)):
            one = slice(token, token + 1)
            alone = expand_into_poison(
                v.view(num_tokens, 3, 16)[token], lora_b, ids[one], num_local=6, adapter_ids=adapter_ids[one]
            )
            tolerance = 2.1 * UNIT_ROUNDOFF[dtype] if dtype != torch.float32 else 1e-5
            torch.testing.assert_close(delta[one], alone, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 256, 1024])
def test_expand_follows_its_slots(num_tokens, device, dtype):
    """E03: ranks 8 and 32, scales 0.5 and 4; swapping the slots and the ids changes nothing."""
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = (torch.arange(num_tokens, device=device) % 2).int()
    v, lora_b = random_v(num_tokens * 2, 64, device), random_b(2, 4, 64, 32, device, dtype)
    ranks = torch.tensor([[8, 8], [32, 32]], dtype=torch.int32, device=device)
    scaling = torch.tensor([[0.5, 0.5, 0.5], [4.0, 4.0, 4.0]], device=device)
    first = check(v, lora_b, ids, num_local=4, adapter_ids=adapter_ids, ranks=ranks, scaling=scaling)
    swapped = check(
        v, lora_b.flip(0), ids, num_local=4, adapter_ids=1 - adapter_ids, ranks=ranks.flip(0).contiguous(),
        scaling=scaling.flip(0).contiguous(),
    )  # fmt: skip
    for a, b in zip(first, swapped, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_expand_of_ids_out_of_range(num_tokens, device, dtype):
    """B12, E09, F01: such pairs get exact zeros, also with an expert offset; slots out of range count as none."""
    ids = random_ids(num_tokens, 4, 16, device)
    for i, wild in enumerate(WILD_IDS):
        ids[i % num_tokens, i % 4] = wild
    adapter_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    adapter_ids[-3:] = torch.tensor([2, 2**40, -(2**40)], device=device)
    v, lora_b = random_v(num_tokens * 4, 16, device), random_b(2, 5, 48, 8, device, dtype)
    check(v, lora_b, ids, num_local=5, expert_offset=7, adapter_ids=adapter_ids)


@pytest.mark.parametrize("num_tokens", [5, 300])
def test_expand_scaling_and_row_weights(num_tokens, device, dtype):
    """D06, J12: scale and router weight multiply once, in fp32, after the dot product; nothing is changed in place."""
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = cyclic_slots(num_tokens, 3, device)
    v, lora_b, scaling = (
        random_v(num_tokens * 2, 16, device),
        random_b(3, 4, 64, 8, device, dtype),
        random_scaling(3, device),
    )
    weights = random_weights(num_tokens, 2, device)
    strided = torch.stack([weights, torch.full_like(weights, NAN)], dim=2)[..., 0]
    before = [tensor.clone() for tensor in (v, lora_b, scaling, weights)]
    for row_weights in (weights, weights.bfloat16(), strided):
        check(v, lora_b, ids, num_local=4, adapter_ids=adapter_ids, scaling=scaling, row_weights=row_weights)
    check(v, lora_b, ids, num_local=4, adapter_ids=adapter_ids)
    assert all(same_bits(a, b) for a, b in zip(before, (v, lora_b, scaling, weights), strict=True))


@pytest.mark.parametrize("num_tokens", [9, 300])
@pytest.mark.parametrize("num_local", [1, 4])
def test_expand_with_one_b_for_all_experts(num_local, num_tokens, device, dtype):
    """J09: shared outer down B is used by every local pair, and by no other."""
    ids = random_ids(num_tokens, 2, 8, device)
    lora_b = random_b(3, 1, 136, 8, device, dtype)
    check(
        random_v(num_tokens * 2, 8, device), lora_b, ids, part="down", num_local=num_local,
        adapter_ids=cyclic_slots(num_tokens, 3, device), scaling=random_scaling(3, device),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_expand_of_one_rank_vector_per_token(num_tokens, device, dtype):
    """J09: what a shared outer A leaves; also, v of pairs that are not local is not needed."""
    ids = random_ids(num_tokens, 4, 8, device)
    check(
        random_v(num_tokens, 16, device), random_b(2, 3, 64, 8, device, dtype), ids, num_local=3, expert_offset=2,
        adapter_ids=cyclic_slots(num_tokens, 2, device),
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [40, 400])
def test_expand_of_many_matrices(num_tokens, device, dtype):
    """B08: slots times experts above 1024, all in one batch."""
    ids = random_ids(num_tokens, 4, 96, device)
    adapter_ids = (torch.arange(num_tokens, device=device) * 7 % 16).int()
    check(random_v(num_tokens * 4, 8, device), random_b(16, 96, 32, 8, device, dtype), ids, num_local=96,
          adapter_ids=adapter_ids)  # fmt: skip


@pytest.mark.parametrize("num_tokens", [6, 400])
def test_expand_of_strided_stacks(num_tokens, device, dtype):
    """C10: B inside wider stacks, with aligned and with odd row strides; strided ids."""
    ids = random_ids(2, num_tokens, num_tokens + 1, device).t() % 4
    adapter_ids = cyclic_slots(3 * num_tokens, 2, device)[num_tokens : 3 * num_tokens : 2]
    v = random_v(num_tokens * 2, 16, device)
    wide = random_b(4, 4, 64, 24, device, dtype)[1:3, ..., 8:16]
    assert wide.data_ptr() % 16 == 0
    odd = random_b(2, 4, 64, 11, device, dtype)[..., 2:10]
    for lora_b in (wide, odd, wide.contiguous().transpose(0, 1).contiguous().transpose(0, 1)):
        results = check(v, lora_b, ids, num_local=4, adapter_ids=adapter_ids)
        copied = check(v, lora_b.contiguous(), ids.contiguous(), num_local=4, adapter_ids=adapter_ids)
        tolerance = 2.1 * UNIT_ROUNDOFF[dtype] if dtype != torch.float32 else 1e-5
        for a, b in zip(results, copied, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [5, 300])
def test_expand_of_large_cancelling_rank_vectors(num_tokens, device, dtype):
    """D03: rank vectors of about 300 whose terms cancel; they are not rounded to the model's dtype."""
    ids = random_ids(num_tokens, 2, 4, device)
    half = random_b(1, 4, 64, 32, device, dtype)
    lora_b = torch.cat([half, -half], dim=3)
    v = 300 + random_v(num_tokens * 2, 64, device)
    results = check(v, lora_b, ids, num_local=4)
    expected, _ = oracle(v, lora_b, ids, num_local=4)
    for delta in results:
        rounded_v, _ = oracle(v.to(dtype).float(), lora_b, ids, num_local=4)
        error = (delta.double() - expected).norm()
        if dtype != torch.float32:
            assert error < 0.25 * (rounded_v - expected).norm()


@pytest.mark.parametrize("num_tokens", [2, 300])
def test_expand_gives_the_same_bits_every_time(num_tokens, device, dtype):
    """D11: no order-dependent sums."""
    ids = random_ids(num_tokens, 8, 16, device)
    v, lora_b = random_v(num_tokens * 8, 32, device), random_b(1, 16, 256, 16, device, dtype)
    for maps in (None, sort_pairs(ids, 16, num_slots=1)):
        first = expand_into_poison(v, lora_b, ids, num_local=16, sort=maps)
        for _ in range(repeats(device)):
            assert same_bits(expand_into_poison(v, lora_b, ids, num_local=16, sort=maps), first)


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_expand_rows_do_not_mix(num_tokens, device, dtype):
    """K10: the bits of a row are the same whatever the other rows hold."""
    ids = random_ids(num_tokens, 2, 4, device)
    adapter_ids = cyclic_slots(num_tokens, 2, device)
    v, lora_b = random_v(num_tokens * 2, 16, device), random_b(2, 4, 64, 8, device, dtype)
    noisy = v.clone().view(num_tokens, 2, 16)
    noisy[::2] = torch.inf
    noisy[::4] = NAN
    for maps in (None, sort_pairs(ids, 4, adapter_ids=adapter_ids, num_slots=2)):
        clean = expand_into_poison(v, lora_b, ids, num_local=4, adapter_ids=adapter_ids, sort=maps)
        mixed = expand_into_poison(noisy.view(-1, 16), lora_b, ids, num_local=4, adapter_ids=adapter_ids, sort=maps)
        assert same_bits(mixed[1::2].contiguous(), clean[1::2].contiguous())


def test_expand_of_nothing(device, dtype):
    """C01, F09: no tokens, no local pair, no adapter slot."""
    lora_b = random_b(1, 4, 64, 8, device, dtype)
    no_ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    no_v = torch.empty(0, 16, device=device)
    assert ops.lora_expand(no_v, lora_b, no_ids, part="gate_up", num_local_experts=4).shape == (0, 2, 64)
    for num_tokens in (3, 300):
        v = torch.full((num_tokens * 2, 16), NAN, device=device)
        ids = torch.full((num_tokens, 2), -1, dtype=torch.int32, device=device)
        for sort in (None, sort_pairs(ids, 4, num_slots=1)):
            delta = expand_into_poison(v, lora_b, ids, num_local=4, sort=sort)
            assert same_bits(delta, torch.zeros_like(delta))
        delta = expand_into_poison(v, lora_b[:0], random_ids(num_tokens, 2, 4, device), num_local=4)
        assert same_bits(delta, torch.zeros_like(delta))


def test_expand_refuses_bad_arguments(device, dtype):
    """C10, E12, F05, K12: every message names the argument; a v of the wrong width is refused."""
    v = torch.zeros(8, 16, device=device)
    lora_b = torch.zeros(2, 4, 64, 8, dtype=dtype, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    slots = torch.zeros(4, dtype=torch.int32, device=device)

    def expand(v=v, lora_b=lora_b, ids=ids, adapter_ids=slots, part="gate_up", num_local=4, **rest):
        return ops.lora_expand(v, lora_b, ids, adapter_ids=adapter_ids, part=part, num_local_experts=num_local, **rest)

    expand()
    refused = [
        ("v", {"v": torch.zeros(8, 32, device=device)}),
        ("v", {"v": torch.zeros(8, 12, device=device)}),
        ("v", {"part": "down"}),
        ("v", {"v": v[:7]}),
        ("v", {"v": torch.zeros(8, 32, device=device)[:, :16]}),
        ("v", {"v": torch.zeros(8 * 16 + 1, device=device)[1:].view(8, 16)}),
        ("lora_b", {"lora_b": lora_b[:, :3]}),
        ("lora_b", {"lora_b": lora_b[:, :1]}),
        ("lora_b", {"lora_b": lora_b[:, :, :60]}),
        ("lora_b", {"lora_b": torch.zeros(2, 4, 64, 257, dtype=dtype, device=device)}),
        ("lora_b", {"lora_b": lora_b.transpose(2, 3).contiguous().transpose(2, 3)}),
        ("scaling", {"scaling": torch.ones(2, device=device)}),
        ("scaling", {"scaling": torch.ones(1, 3, device=device)}),
        ("row_weights", {"row_weights": torch.ones(4, 1, device=device)}),
        ("adapter_ids", {"adapter_ids": slots[:3]}),
        ("adapter_ids", {"adapter_ids": None}),
        ("ranks", {"ranks": torch.zeros(2, 3, dtype=torch.int32, device=device)}),
        ("num_local_experts", {"num_local": 0}),
        ("part", {"part": "up"}),
    ]
    for name, change in refused:
        with pytest.raises(ValueError, match=name):
            expand(**change)
    mistyped = [
        ("v", {"v": v.to(torch.bfloat16)}),
        ("lora_b", {"lora_b": lora_b.double()}),
        ("scaling", {"scaling": torch.ones(2, 3, dtype=torch.float64, device=device)}),
        ("row_weights", {"row_weights": torch.ones(4, 2, dtype=torch.float16, device=device)}),
        ("topk_ids", {"ids": ids.float()}),
    ]
    for name, change in mistyped:
        with pytest.raises(TypeError, match=name):
            expand(**change)
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.moelora.lora_expand.out(
            v, lora_b, ids, slots, None, None, None, 0, 4, 0, out=lora_b.new_zeros(4, 2, 72)[..., :64]
        )


def test_expand_passes_opcheck(device, dtype):
    ids = random_ids(6, 2, 4, device)
    slots = cyclic_slots(6, 2, device)
    sort = sort_pairs(ids, 4, adapter_ids=slots, num_slots=2)
    maps = (sort.permuted_to_expanded, sort.tile_expert, sort.tile_row_limit)
    scaling, weights = random_scaling(2, device), random_weights(6, 2, device)
    v, lora_b = random_v(12, 16, device), random_b(2, 4, 64, 8, device, dtype)
    for options in ((slots, None, None, None, 0, 4, 0), (slots, None, scaling, weights, 0, 4, 0, *maps)):
        torch.library.opcheck(torch.ops.moelora.lora_expand.default, (v, lora_b, ids, *options))
