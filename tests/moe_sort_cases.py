"""Tests of the moe_sort op for any device: a test file imports them and has the fixture `device`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moelora
from moelora.ops import MoeSortResult
from moelora.reference import moe_sort_reference

POISON = 0x7FFFFFFF
GUARD = 16
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def sort(topk_ids, *, adapter_ids=None, ranks=None, num_slots=0, num_local_experts, expert_offset=0, tile_rows=16):
    """moe_sort into poisoned buffers with guard words around them, over a poisoned workspace."""
    device = topk_ids.device
    num_tokens, top_k = topk_ids.shape
    max_rows = moelora.ops.max_padded_rows(num_tokens * top_k, num_local_experts, tile_rows)
    sizes = MoeSortResult(num_tokens * top_k, max_rows, num_local_experts + 1, max_rows // tile_rows,
                          max_rows // tile_rows, 1)  # fmt: skip
    whole = [torch.full((size + 2 * GUARD,), POISON, dtype=torch.int32, device=device) for size in sizes]
    maps = MoeSortResult(*(buffer[GUARD : buffer.numel() - GUARD] for buffer in whole))
    scratch = 0
    if device.type == "cuda":
        scratch = moelora.ops.moe_sort_workspace_bytes(num_tokens, num_local_experts, num_slots)
    workspace = torch.full((scratch // 4 + 2 * GUARD,), POISON, dtype=torch.int32, device=device)
    torch.ops.moelora.moe_sort.out(
        topk_ids, adapter_ids, ranks, num_slots, num_local_experts, expert_offset, tile_rows, **maps._asdict(),
        workspace=workspace[GUARD : workspace.numel() - GUARD],
    )  # fmt: skip
    for buffer in [*whole, workspace]:
        assert (buffer[:GUARD] == POISON).all()
        assert (buffer[-GUARD:] == POISON).all()
    return maps


def assert_matches_reference(topk_ids, **options):
    maps = sort(topk_ids, **options)
    cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = moe_sort_reference(topk_ids.cpu(), **{"tile_rows": 16} | cpu)
    for name in MoeSortResult._fields:
        assert torch.equal(getattr(maps, name).cpu(), getattr(expected, name)), name
    return maps


def random_ids(num_tokens, top_k, num_experts, device, seed=0, dtype=torch.int32):
    """Ids [T, K], distinct in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=1).indices
    return ids.to(dtype).to(device)


def random_slots(num_tokens, num_slots, device, seed=0, dtype=torch.int32):
    """Adapter ids [T] of -1..L-1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_slots, (num_tokens,), generator=generator).to(dtype).to(device)


# ---- sizes ----


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 255, 256, 257, 384, 513, 1024, 3000])
@pytest.mark.parametrize("tile_rows", [16, 64, 1, 48])
def test_both_sides_of_every_path_match_the_reference(device, num_tokens, tile_rows):
    """At K = 8: one block up to 256 tokens, several chunks from 257 on."""
    ids = random_ids(num_tokens, 8, 128, device)
    assert_matches_reference(ids, num_local_experts=128, tile_rows=tile_rows)
    slots = random_slots(num_tokens, 4, device)
    assert_matches_reference(ids, adapter_ids=slots, num_slots=4, num_local_experts=128, tile_rows=tile_rows)


@pytest.mark.parametrize("num_experts", [64, 127, 128, 129, 256, 384, 512, 1000, 1024])
@pytest.mark.parametrize("num_tokens", [1, 300, 2500])
def test_any_number_of_experts(device, num_experts, num_tokens):
    """B07: counts match a bincount."""
    ids = random_ids(num_tokens, 8, num_experts, device)
    maps = assert_matches_reference(ids, num_local_experts=num_experts)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    padded = (counts + 15) // 16 * 16
    assert torch.equal(maps.expert_offsets[1:].long(), padded.cumsum(0))


@pytest.mark.parametrize("num_experts,top_k,num_tokens", [(256, 8, 8191), (256, 8, 8192), (256, 8, 8193),
                                                          (128, 8, 8191), (64, 10, 6554), (128, 8, 20_000),
                                                          (8, 1, 140_001)])  # fmt: skip
def test_many_pairs(device, num_experts, top_k, num_tokens):
    """B06, B10"""
    ids = random_ids(num_tokens, top_k, num_experts, device)
    slots = random_slots(num_tokens, 3, device)
    assert_matches_reference(ids, adapter_ids=slots, num_slots=3, num_local_experts=num_experts)


@pytest.mark.parametrize("num_slots,num_experts", [(7, 128), (8, 128), (9, 128), (16, 384), (1000, 16), (1023, 4),
                                                   (1024, 4), (3000, 8), (1_050_000, 4)])  # fmt: skip
@pytest.mark.parametrize("num_tokens", [5, 400, 2600])
def test_any_number_of_slots(device, num_slots, num_experts, num_tokens):
    """B08: 1024 (slot, expert) buckets and more, and slots of several digits."""
    ids = random_ids(num_tokens, 4, num_experts, device)
    for slots in (
        random_slots(num_tokens, num_slots, device),
        torch.full((num_tokens,), num_slots - 1, dtype=torch.int32, device=device),
    ):
        assert_matches_reference(ids, adapter_ids=slots, num_slots=num_slots, num_local_experts=num_experts)


@pytest.mark.parametrize("num_slots,num_experts", [(7, 128), (8, 128), (9, 128), (16, 384)])
@pytest.mark.parametrize("num_tokens", [64, 4096])
def test_only_the_last_bucket(device, num_slots, num_experts, num_tokens):
    """B08"""
    ids = torch.full((num_tokens, 1), num_experts - 1, dtype=torch.int32, device=device)
    slots = torch.full((num_tokens,), num_slots - 1, dtype=torch.int32, device=device)
    maps = assert_matches_reference(ids, adapter_ids=slots, num_slots=num_slots, num_local_experts=num_experts)
    assert maps.num_padded_rows.item() == num_tokens
    assert maps.expert_offsets[-2:].tolist() == [0, num_tokens]


@pytest.mark.parametrize("num_experts", [5, 6, 60])
@pytest.mark.parametrize("used", [[0, 1, 2], [4]])
@pytest.mark.parametrize("num_tokens", [64, 1200])
def test_experts_that_get_no_rows(device, num_experts, used, num_tokens):
    """B09"""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(used)[torch.randint(len(used), (num_tokens, 2), generator=generator)].int().to(device)
    maps = assert_matches_reference(ids, num_local_experts=num_experts, tile_rows=1)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    assert torch.equal(maps.expert_offsets.diff(), counts.int())


@pytest.mark.parametrize("num_tokens", [1, 2048, 2049, 5000, 140_000])
def test_all_pairs_on_one_expert(device, num_tokens):
    ids = torch.zeros(num_tokens, 1, dtype=torch.int64, device=device)
    maps = assert_matches_reference(ids, num_local_experts=1)
    assert torch.equal(maps.expanded_to_permuted, torch.arange(num_tokens, dtype=torch.int32, device=device))


def test_the_bound_of_the_rows_is_reached(device):
    """P_max is the least upper bound: one pair for all experts but one, the rest on that one."""
    num_experts, tile = 8, 16
    ids = torch.tensor([*range(num_experts), *[0] * 32], dtype=torch.int32, device=device)[:, None]
    maps = assert_matches_reference(ids, num_local_experts=num_experts, tile_rows=tile)
    assert maps.num_padded_rows.item() == maps.permuted_to_expanded.numel()


def test_one_token_with_a_wide_tile(device):
    """B05"""
    ids = torch.tensor([[5]], dtype=torch.int32, device=device)
    maps = assert_matches_reference(ids, num_local_experts=8, tile_rows=128)
    assert maps.permuted_to_expanded.tolist() == [0] + [-1] * 127
    assert (maps.tile_expert.item(), maps.tile_row_limit.item(), maps.num_padded_rows.item()) == (5, 1, 128)


@pytest.mark.parametrize("num_slots", [0, 3])
def test_no_tokens(device, num_slots):
    """B05, B11: every output is defined."""
    slots = torch.empty(0, dtype=torch.int32, device=device) if num_slots else None
    ids = torch.empty(0, 4, dtype=torch.int32, device=device)
    maps = assert_matches_reference(ids, adapter_ids=slots, num_slots=num_slots, num_local_experts=6)
    assert maps.expert_offsets.tolist() == [0] * 7
    assert maps.num_padded_rows.item() == 0
    assert maps.permuted_to_expanded.numel() == maps.tile_expert.numel() == 0


# ---- ids ----


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 5000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expert_offset", [0, 32, 96])
def test_ids_that_name_no_local_expert_are_left_out(device, num_tokens, dtype, expert_offset):
    """B12, A11"""
    num_local = 32
    bad = [-1, expert_offset - 1, expert_offset + num_local, 128, 129, INT32_MAX, INT32_MIN, INT32_MIN + 5]
    if dtype == torch.int64:
        bad += [2**32 + expert_offset, -(2**32) + expert_offset, 2**63 - 1, -(2**63)]
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(128, (num_tokens, 6), generator=generator)
    spoil = torch.rand(num_tokens, 6, generator=generator) < 0.4
    ids[spoil] = torch.tensor(bad)[torch.randint(len(bad), (int(spoil.sum()),), generator=generator)]
    ids = ids.to(dtype).to(device)
    slots = random_slots(num_tokens, 2, device)
    for options in ({}, {"adapter_ids": slots, "num_slots": 2}):
        maps = assert_matches_reference(ids, num_local_experts=num_local, expert_offset=expert_offset, **options)
        local = (ids >= expert_offset) & (ids < expert_offset + num_local)
        assert torch.equal(maps.expanded_to_permuted >= 0, local.flatten())


@pytest.mark.parametrize("num_tokens", [3, 2000])
def test_a_rank_with_no_local_pair(device, num_tokens):
    ids = random_ids(num_tokens, 4, 32, device)
    maps = assert_matches_reference(ids, num_local_experts=32, expert_offset=32)
    assert maps.num_padded_rows.item() == 0
    assert (maps.permuted_to_expanded == -1).all()
    assert (maps.tile_expert == -1).all()
    assert (maps.tile_row_limit == 0).all()


def test_offsets_near_the_end_of_int32(device):
    offset = INT32_MAX - 8
    ids = torch.tensor([[offset, offset + 7, INT32_MIN, -1], [0, offset - 1, INT32_MAX, offset + 7]], device=device)
    for dtype in (torch.int32, torch.int64):
        maps = assert_matches_reference(ids.to(dtype), num_local_experts=8, expert_offset=offset)
        assert (maps.expanded_to_permuted >= 0).tolist() == [True, True, False, False, False, False, False, True]


@pytest.mark.parametrize("num_tokens", [2, 3000])
def test_a_row_may_name_an_expert_several_times(device, num_tokens):
    """B13"""
    ids = random_ids(num_tokens, 4, 8, device)
    ids[0] = 3
    maps = assert_matches_reference(ids, num_local_experts=8)
    rows = maps.expanded_to_permuted[:4]
    assert rows.tolist() == list(range(rows[0], rows[0] + 4))


def test_the_two_maps_are_each_others_inverse(device):
    """B04: ids whose sort is far from its own inverse."""
    ids = random_ids(97, 6, 64, device)
    maps = assert_matches_reference(ids, num_local_experts=64)
    pairs = torch.arange(97 * 6, dtype=torch.int32, device=device)
    rows = maps.expanded_to_permuted.long()
    assert torch.equal(maps.permuted_to_expanded[rows], pairs)
    assert (maps.permuted_to_expanded >= 0).sum() == pairs.numel()
    twice = maps.expanded_to_permuted[rows.clamp(max=pairs.numel() - 1)]
    assert (twice != pairs).float().mean() > 0.9


@pytest.mark.parametrize("num_tokens", [5, 1100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_are_followed(device, num_tokens, dtype):
    wide = random_ids(num_tokens, 12, 40, device, dtype=dtype)
    slots = random_slots(2 * num_tokens, 3, device, dtype=dtype)[::2]
    transposed = wide.t().contiguous().t()
    for ids in (wide[:, 2:7], wide[:, ::3], transposed, wide[:1].expand(num_tokens, 12), wide.flip(0)):
        assert_matches_reference(ids, num_local_experts=40)
        assert_matches_reference(ids, adapter_ids=slots, num_slots=3, num_local_experts=40)


# ---- slots ----


@pytest.mark.parametrize("tile_rows", [16, 64])
def test_several_slots_differ_from_one_by_order_alone(device, tile_rows):
    """B01: E = 32, K = 4, T = 5, L = 4."""
    ids = random_ids(5, 4, 32, device)
    slots = torch.tensor([3, 1, -1, 0, 2], dtype=torch.int32, device=device)
    maps = assert_matches_reference(ids, adapter_ids=slots, num_slots=4, num_local_experts=32, tile_rows=tile_rows)
    plain = assert_matches_reference(ids, num_local_experts=32, tile_rows=tile_rows)
    for name in ("expert_offsets", "tile_expert", "tile_row_limit", "num_padded_rows"):
        assert torch.equal(getattr(maps, name), getattr(plain, name))
    expert_of = torch.bucketize(maps.expanded_to_permuted, maps.expert_offsets[1:].contiguous(), right=True)
    assert torch.equal(expert_of.int(), ids.flatten())


@pytest.mark.parametrize("num_tokens", [40, 1500])
def test_inside_an_expert_rows_go_by_slot_and_then_by_pair(device, num_tokens):
    ids = torch.zeros(num_tokens, 2, dtype=torch.int32, device=device)
    slots = random_slots(num_tokens, 3, device)
    maps = sort(ids, adapter_ids=slots, num_slots=3, num_local_experts=1)
    pairs = maps.permuted_to_expanded[: 2 * num_tokens].long()
    slot_of_row = slots[pairs // 2]
    order = torch.where(slot_of_row < 0, 3, slot_of_row) * (2 * num_tokens) + pairs
    assert (order[1:] > order[:-1]).all()


@pytest.mark.parametrize("num_tokens", [30, 2100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_adapter_ids_that_name_no_slot_count_as_none(device, num_tokens, dtype):
    """-1, L and far outside, and slots of rank 0 on both sides."""
    ids = random_ids(num_tokens, 2, 4, device)
    values = torch.tensor([0, 1, 2, 3, -1, -7, 4, INT32_MAX, INT32_MIN, 2**40 if dtype == torch.int64 else 5])
    generator = torch.Generator().manual_seed(0)
    slots = values[torch.randint(len(values), (num_tokens,), generator=generator)].to(dtype).to(device)
    ranks = torch.tensor([[8, 0], [0, 0], [0, 4], [-1, 0]], dtype=torch.int32, device=device)
    assert_matches_reference(ids, adapter_ids=slots, num_slots=4, num_local_experts=4)
    maps = assert_matches_reference(ids, adapter_ids=slots, ranks=ranks, num_slots=4, num_local_experts=4)
    as_none = torch.where((slots == 0) | (slots == 2), slots, -1)
    same = sort(ids, adapter_ids=as_none, num_slots=4, num_local_experts=4)
    for map_, expected in zip(maps, same, strict=True):
        assert torch.equal(map_, expected)


@pytest.mark.parametrize("num_tokens", [9, 1500])
def test_one_slot_without_adapter_ids_is_everyones(device, num_tokens):
    ids = random_ids(num_tokens, 3, 6, device)
    maps = assert_matches_reference(ids, num_slots=1, num_local_experts=6)
    plain = sort(ids, num_local_experts=6)
    for map_, expected in zip(maps, plain, strict=True):
        assert torch.equal(map_, expected)


# ---- the rest ----


def test_the_wrapper_and_the_functional_form_give_the_same(device):
    ids = random_ids(19, 3, 12, device)
    slots = random_slots(19, 2, device)
    expected = sort(ids, adapter_ids=slots, num_slots=2, num_local_experts=12, tile_rows=32)
    wrapped = moelora.ops.moe_sort(ids, adapter_ids=slots, num_slots=2, num_local_experts=12, tile_rows=32)
    functional = torch.ops.moelora.moe_sort(ids, slots, None, 2, 12, 0, 32)
    for one, two, three in zip(expected, wrapped, functional, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("num_tokens", [200, 3000])
def test_a_token_does_not_depend_on_the_tokens_after_it(device, num_tokens):
    """Stable: a batch cut short keeps the order of what is left."""
    ids = random_ids(num_tokens, 4, 16, device)
    whole = sort(ids, num_local_experts=16)
    for cut in (1, num_tokens // 2, num_tokens - 1):
        part = sort(ids[:cut], num_local_experts=16)
        for e in range(16):
            pairs = [
                maps.permuted_to_expanded[maps.expert_offsets[e] : maps.expert_offsets[e + 1]] for maps in (whole, part)
            ]
            kept = pairs[0][(pairs[0] >= 0) & (pairs[0] < 4 * cut)]
            assert torch.equal(kept, pairs[1][pairs[1] >= 0])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_shape_matches_the_reference(device, data):
    num_tokens = data.draw(st.one_of(st.integers(0, 80), st.integers(250, 1500)))
    top_k = data.draw(st.integers(1, 32 if num_tokens < 100 else 8))
    num_experts = data.draw(st.integers(1, 1024))
    num_local = data.draw(st.integers(1, num_experts))
    options = {
        "num_local_experts": num_local,
        "expert_offset": data.draw(st.integers(0, num_experts - num_local)),
        "tile_rows": data.draw(st.sampled_from([1, 8, 16, 24, 128, 1000])),
    }
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    used = data.draw(st.integers(1, num_experts))
    ids = torch.randint(-1, used, (num_tokens, top_k), generator=generator)
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    num_slots = data.draw(st.sampled_from([0, 1, 2, 7, 40, 1500]))
    if num_slots:
        slots = torch.randint(-1, num_slots + 1, (num_tokens,), generator=generator)
        options |= {"adapter_ids": slots.to(dtype).to(device), "num_slots": num_slots}
        if data.draw(st.booleans()):
            options["ranks"] = torch.randint(0, 2, (num_slots, 2), generator=generator).int().to(device)
    assert_matches_reference(ids.to(dtype).to(device), **options)


# ---- refusals ----


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint32, torch.int8, torch.float32, torch.bool])
def test_ids_of_another_dtype_are_refused_by_name(device, dtype):
    """A11"""
    ids = torch.zeros(2, 2, device=device).to(dtype)
    with pytest.raises(TypeError, match=rf"topk_ids.*{str(dtype).removeprefix('torch.')}|topk_ids.*another dtype"):
        moelora.ops.moe_sort(ids, num_local_experts=4)
    good = torch.zeros(2, 2, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="adapter_ids"):
        moelora.ops.moe_sort(good, adapter_ids=ids[0], num_slots=2, num_local_experts=4)
    ranks = torch.zeros(2, 2, device=device).to(dtype)
    with pytest.raises(TypeError, match="ranks"):
        moelora.ops.moe_sort(good, adapter_ids=good[0], ranks=ranks, num_slots=2, num_local_experts=4)


@pytest.mark.parametrize("changes,name", [
    ({"num_local_experts": 0}, "num_local_experts"),
    ({"num_local_experts": -1}, "num_local_experts"),
    ({"num_local_experts": 1025}, "num_local_experts"),
    ({"expert_offset": -1}, "expert_offset"),
    ({"expert_offset": INT32_MAX}, "expert_offset"),
    ({"tile_rows": 0}, "tile_rows"),
    ({"tile_rows": -16}, "tile_rows"),
    ({"num_slots": -1}, "num_slots"),
    ({"num_slots": 2}, "adapter_ids"),
])  # fmt: skip
def test_sizes_out_of_range_are_refused_by_name(device, changes, name):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=name):
        moelora.ops.moe_sort(ids, **{"num_local_experts": 4} | changes)


def test_wrong_shapes_are_refused_by_name(device):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    for bad in (ids[0], ids[None], ids[:, :0], ids[:, :1].expand(3, 33)):
        with pytest.raises(ValueError, match="topk_ids"):
            moelora.ops.moe_sort(bad, num_local_experts=4)
    for bad in (ids[:2, 0], ids):
        with pytest.raises(ValueError, match="adapter_ids"):
            moelora.ops.moe_sort(ids, adapter_ids=bad, num_slots=2, num_local_experts=4)
    with pytest.raises(ValueError, match="ranks"):
        moelora.ops.moe_sort(ids, adapter_ids=ids[:, 0], ranks=ids, num_slots=2, num_local_experts=4)


@pytest.mark.parametrize("name,size", [("expanded_to_permuted", 5), ("permuted_to_expanded", 63), ("expert_offsets", 4),
                                       ("tile_expert", 5), ("tile_row_limit", 3), ("num_padded_rows", 2)])  # fmt: skip
def test_wrong_output_buffers_are_refused_by_name(device, name, size):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    maps = {field: torch.zeros_like(buffer) for field, buffer in
            moelora.ops.moe_sort(ids, num_local_experts=4)._asdict().items()}  # fmt: skip
    workspace = torch.zeros(4096, dtype=torch.uint8, device=device)
    for bad, kind in (
        (torch.zeros(size, dtype=torch.int32, device=device), "value"),
        (maps[name].long(), "type"),
    ):
        with pytest.raises(RuntimeError, match=f"{kind} error: {name}"):
            torch.ops.moelora.moe_sort.out(ids, None, None, 0, 4, 0, 16, **maps | {name: bad}, workspace=workspace)
    over_the_ids = maps | {"expanded_to_permuted": ids.view(-1)}
    with pytest.raises(RuntimeError, match=r"expanded_to_permuted.*topk_ids"):
        torch.ops.moelora.moe_sort.out(ids, None, None, 0, 4, 0, 16, **over_the_ids, workspace=workspace)
