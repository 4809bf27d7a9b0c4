"""Tests of the layer's adapters for any device: the maths of the terms, ranks and forms, which token gets which slot.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

import pytest
import torch
from layer_cases import SMALL, check, ints, make, oracle, run, split_lora

from moelora import MoELoRA
from moelora.testing import Shape, check_close, random_lora
from moelora.testing.inputs import random_adapter_ids


def on_plain_path(layer, lora, adapter_ids, **options):
    """The path on which a row without adapter has the bits of `lora=None`."""
    return run(layer, lora, adapter_ids, **options, stream_mode="single")


# ---- the adapter's terms ----


@pytest.mark.parametrize("zeroed", ["gate A", "up A", "gate B", "up B"])
def test_gate_and_up_have_their_own_rows_of_a_and_b(device, dtype, zeroed):
    """D01: one half is 0, so a delta in the wrong half shows"""
    layer, lora, adapter_ids = make(11, device, dtype)
    tensor = lora.gate_up_a if zeroed.endswith("A") else lora.gate_up_b
    gate, up = tensor.chunk(2, dim=2)
    (gate if zeroed.startswith("gate") else up).zero_()
    check(layer, lora, adapter_ids)


RANKS = [1, 2, 3, 4, 5, 8, 12, 20, 24, 48, 96, 128, 129, 256]


@pytest.mark.parametrize("rank", RANKS)
def test_ranks(device, dtype, rank):
    """D08, D09: stacks allocated for just that rank"""
    layer, lora, adapter_ids = make(9, device, dtype, Shape(128, 64, 4, 2), slots=2, rank=rank)
    check(layer, lora, adapter_ids)


@pytest.mark.parametrize("rank", [1, 4, 5, 17, 64])
@pytest.mark.parametrize("allocated", [64, 72, 256])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_ranks_below_the_allocated_one(device, dtype, rank, allocated, tokens):
    """D08, D09, E04: what lies beyond an adapter's rank is NaN and never matters"""
    ranks = [(rank, max(1, rank // 2)), (allocated, rank)]
    layer, lora, adapter_ids = make(tokens, device, dtype, slots=2, rank=allocated, ranks=ranks)
    if tokens <= 2:
        adapter_ids.copy_(torch.arange(tokens))
    check(layer, lora, adapter_ids)


def test_an_adapter_padded_to_a_larger_rank_computes_the_same(device, dtype):
    """E04: up's A starts at row R, not r"""
    layer, lora, _ = make(9, device, dtype, slots=1, rank=8)
    padded = MoELoRA.stack([lora])
    assert padded.gate_up_rank == 8
    wide = random_lora(1, SMALL, 64, dtype=dtype, device=device, ranks=[(8, 8)])
    wide.gate_up_a.unflatten(2, (2, 64))[:, :, :, :8] = lora.gate_up_a.unflatten(2, (2, 8))
    wide.gate_up_b[..., :8] = lora.gate_up_b
    wide.down_a[:, :, :8] = lora.down_a
    wide.down_b[..., :8] = lora.down_b
    wide.scaling.copy_(lora.scaling)
    check_close(run(layer, wide), oracle(layer, lora))
    check_close(run(layer, padded), oracle(layer, lora))


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("ranks", [None, [(16, 0), (3, 8), (0, 5)]])
@pytest.mark.parametrize("tokens", [2, 23])
def test_forms_of_the_stacks(device, dtype, shared_a, shared_outer, ranks, tokens):
    """J09: gate and up share one A or not, one outer matrix for all experts or not; R1 and R2 differ"""
    layer, lora, adapter_ids = make(
        tokens, device, dtype, rank=(16, 8), ranks=ranks, shared_a=shared_a, shared_outer=shared_outer
    )  # fmt: skip
    check(layer, lora, adapter_ids)
    if tokens <= 2:
        for first in range(lora.num_slots):
            adapter_ids.copy_((torch.arange(tokens) + first) % lora.num_slots)
            check(layer, lora, adapter_ids)


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_adapters_of_one_part(device, dtype, part, tokens):
    """J08: the other part has none"""
    layer, lora, adapter_ids = make(tokens, device, dtype)
    gate_up, down = split_lora(lora)
    check(layer, gate_up if part == "gate_up" else down, adapter_ids)


def test_stacks_may_be_slices_of_larger_ones(device, dtype):
    """C10: slots of a larger pool, rows with gaps, ranks cut from wider rows"""
    layer, lora, adapter_ids = make(11, device, dtype)
    names = ["gate_up_a", "gate_up_b", "down_a", "down_b"]

    def gapped(stack, dim):
        size = list(stack.shape)
        size[dim] += 3
        view = torch.full(size, torch.nan, dtype=dtype, device=device).narrow(dim, 1, stack.shape[dim])
        view.copy_(stack)
        return view

    for dim in range(4):
        stacks = [gapped(getattr(lora, name), dim) for name in names]
        check(layer, MoELoRA(*stacks, lora.scaling), adapter_ids)


def test_one_scale_per_slot(device, dtype):
    """`scaling` [L] holds for gate, up and down."""
    layer, lora, adapter_ids = make(11, device, dtype)
    scaling = torch.tensor([0.5, 2.0, 4.0], device=device)
    check(layer, MoELoRA(lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b, scaling), adapter_ids)


def test_rank_vectors_keep_their_precision(device, dtype):
    """D03: rank vectors of about 300 whose terms cancel in B; rounding them to bf16 would show"""
    rank, shape = 64, Shape(512, 32, 2, 1)
    layer, lora, _ = make(8, device, dtype, shape, slots=1, rank=rank)
    for a, b in ((lora.gate_up_a, lora.gate_up_b), (lora.down_a, lora.down_b)):
        a.mul_(300)
        # Rank entries 2i and 2i + 1 are nearly the same, and their columns of B nearly opposite.
        a[:, :, 1::2] = a[:, :, 0::2]
        b[..., 1::2] = -b[..., 0::2]
        b[..., 0] += b.new_tensor(2**-6)
    lora.scaling.fill_(1.0)
    check_close(run(layer, lora), oracle(layer, lora))


# ---- which token gets which slot ----


def check_tokens_alone(layer, lora, adapter_ids):
    """Each token equals its own call, and a token without adapter the bits of the plain layer."""
    got = check(layer, lora, adapter_ids)
    for t in range(len(adapter_ids)):
        alone = run(layer.tokens(slice(t, t + 1)), lora, adapter_ids[t : t + 1])
        expected = oracle(layer.tokens(slice(t, t + 1)), lora, adapter_ids[t : t + 1])
        check_close(got[t : t + 1], expected)
        check_close(alone, expected)
    without = adapter_ids < 0
    assert torch.equal(on_plain_path(layer, lora, adapter_ids)[without], run(layer, stream_mode="single")[without])


@pytest.mark.parametrize(
    ("slots", "adapter_ids"),
    [
        (1, [-1, 0, -1, 0]),
        (4, [-1, 0, 1, 2, 3]),
        (4, [-1, -1, -1, -1]),
        (4, [3, 1, 2, 0, 3]),
        (2, [0, 0, 1, 0]),
        (2, [0, 1, 1, 0]),
        (2, [1, 1, 1, 1]),
        (2, [0, 1, 0, 1]),
        (3, [0] * 7 + [2] + [0] * 2 + [1] * 5),
    ],
)
def test_mixed_batches(device, dtype, slots, adapter_ids):
    """E01, E10: neighbours with the same adapter or not, tokens without, all slots at once"""
    layer, lora, _ = make(len(adapter_ids), device, dtype, slots=slots)
    check_tokens_alone(layer, lora, ints(adapter_ids, device))


def test_one_slot_needs_no_adapter_ids(device, dtype):
    """E01"""
    layer, lora, _ = make(5, device, dtype, slots=1)
    assert torch.equal(check(layer, lora), run(layer, lora, ints([0] * 5, device)))


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 256, 1024])
def test_adapters_of_different_rank_and_scale(device, dtype, tokens):
    """E03: at every batch size; and the slots may be swapped"""
    layer, lora, _ = make(tokens, device, dtype, slots=2, rank=32, ranks=[(8, 8), (32, 32)])
    lora.scaling[0], lora.scaling[1] = 0.5, 4.0
    adapter_ids = torch.arange(tokens, device=device, dtype=torch.int32) % 2
    got = check(layer, lora, adapter_ids)
    stacks = [stack.flip(0) for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b)]
    swapped = MoELoRA(*stacks, lora.scaling.flip(0), lora.ranks.flip(0))
    expected = oracle(layer, lora, adapter_ids)
    check_close(run(layer, swapped, 1 - adapter_ids), expected)
    check_close(got, expected)


def test_eight_adapters_on_128_experts(device, dtype):
    """K01: one call, an adapter id per token, no engine around it"""
    layer, lora, adapter_ids = make(16, device, dtype, Shape(64, 32, 128, 8), slots=8)
    check(layer, lora, adapter_ids)


def test_many_slots(device, dtype):
    """B01, B08: slots times experts beyond 1024"""
    layer, lora, _ = make(64, device, dtype, Shape(16, 8, 32, 4), slots=40, rank=4)
    check(layer, lora, random_adapter_ids(64, 40, device=device))
    check(layer, lora, ints([39] * 64, device))


def test_an_empty_slot_computes_as_no_adapter(device, dtype):
    """whatever bytes the slot holds; empty on one side only, too"""
    layer, lora, _ = make(8, device, dtype, slots=4, rank=8, ranks=[(8, 8), (0, 0), (0, 8), (8, 0)])
    adapter_ids = ints([0, 1, 2, 3, 1, 0, -1, 1], device)
    check(layer, lora, adapter_ids)
    as_none = torch.where(adapter_ids == 1, -1, adapter_ids)
    assert torch.equal(run(layer, lora, adapter_ids), run(layer, lora, as_none))


def test_a_refilled_slot_serves_the_new_adapter_only(device, dtype):
    """E05: after a larger adapter was in it"""
    layer, large, _ = make(9, device, dtype, slots=1, rank=64)
    small = random_lora(1, SMALL, 64, dtype=dtype, device=device, ranks=[(8, 8)], seed=5)
    expected = run(layer, small)
    pool = MoELoRA(
        large.gate_up_a, large.gate_up_b, large.down_a, large.down_b, large.scaling, ints([[64, 64]], device)
    )
    check(layer, pool)
    for old, new in zip(
        (pool.gate_up_a, pool.gate_up_b, pool.down_a, pool.down_b, pool.scaling, pool.ranks),
        (small.gate_up_a, small.gate_up_b, small.down_a, small.down_b, small.scaling, small.ranks),
        strict=True,
    ):
        # Only what the new adapter has; the rest of the slot keeps the old adapter's bytes.
        old.copy_(torch.where(new.isnan(), old, new))
    assert torch.equal(run(layer, pool), expected)


def test_an_adapter_updated_in_place_is_used_at_once(device, dtype):
    """K14: and the other slots are not affected"""
    layer, lora, _ = make(8, device, dtype, slots=2)
    adapter_ids = ints([0, 1] * 4, device)
    before = run(layer, lora, adapter_ids)
    lora.down_b[1].mul_(-2)
    after = check(layer, lora, adapter_ids)
    assert torch.equal(after[0::2], before[0::2])
    assert not torch.equal(after[1::2], before[1::2])


def test_adapter_ids_changed_in_place_are_seen(device, dtype):
    """E06: nothing is kept by a tensor's identity or address"""
    layer, lora, _ = make(8, device, dtype)
    adapter_ids = ints([0] * 8, device)
    first = run(layer, lora, adapter_ids)
    adapter_ids.copy_(ints([1, 2] * 4, device))
    second = check(layer, lora, adapter_ids)
    assert not torch.equal(first, second)
    adapter_ids.fill_(0)
    assert torch.equal(run(layer, lora, adapter_ids), first)


def test_no_adapter_is_left_over_from_the_call_before(device, dtype):
    """E07"""
    layer, lora, _ = make(8, device, dtype)
    without, mixed = ints([-1] * 8, device), ints([-1, 0] * 4, device)
    base = run(layer, stream_mode="single")
    on_plain_path(layer, lora, ints([0] * 8, device))
    assert torch.equal(on_plain_path(layer, lora, without), base)
    assert torch.equal(on_plain_path(layer, lora, mixed)[0::2], base[0::2])
    check_close(run(layer, lora, without), oracle(layer))


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_adapters_that_no_token_uses_change_no_bit(device, dtype, tokens):
    """E08, K05: all ids -1, or adapters whose B is 0"""
    layer, lora, adapter_ids = make(tokens, device, dtype)
    base = run(layer, stream_mode="single")
    assert torch.equal(on_plain_path(layer, lora, torch.full_like(adapter_ids, -1)), base)
    lora.gate_up_b.zero_()
    lora.down_b.zero_()
    assert torch.equal(on_plain_path(layer, lora, adapter_ids.clamp(min=0)), base)


@pytest.mark.parametrize("tokens", [3, 17, 40, 300])
def test_a_row_without_adapter_does_not_depend_on_the_others_adapters(device, dtype, tokens):
    """E08: it has the bits it has when every adapter id is -1, and on the plain path those of the plain layer"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(64, 48, 4, 2))
    adapter_ids[0] = -1
    without = adapter_ids < 0
    none = run(layer, lora, torch.full_like(adapter_ids, -1))
    assert torch.equal(run(layer, lora, adapter_ids)[without], none[without])
    assert torch.equal(on_plain_path(layer, lora, adapter_ids)[without], run(layer, stream_mode="single")[without])


def test_chunks_with_offset_views_equal_the_whole(device, dtype):
    """E11: x[1024:] goes with ids[1024:]"""
    layer, lora, adapter_ids = make(1025, device, dtype, Shape(16, 8, 8, 2))
    expected = oracle(layer, lora, adapter_ids)
    check_close(run(layer, lora, adapter_ids), expected)
    for rows in (slice(0, 1024), slice(1024, 1025), slice(7, 300)):
        check_close(run(layer.tokens(rows), lora, adapter_ids[rows]), expected[rows])
