"""Tests of expert and tensor parallelism for any device: each process's part, simulated one after the other.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

from itertools import pairwise

import pytest
import torch
from layer_cases import LAYOUTS, SMALL, check, ints, make, oracle, run

import moelora
from moelora.testing import Shape, bad_rows, check_close


def expert_part(layer, experts):
    """Weights and biases of a slice of the experts; ids stay global."""
    names = ("w13", "w2", "w13_bias", "w2_bias")
    return layer.with_(**{name: getattr(layer, name)[experts] for name in names})


def inner_part(layer, columns, layout="gate_up"):
    """Gate and up rows and w2 columns of a slice of the intermediate size."""

    def rows(tensor):
        halves = (-1, 2) if layout == "interleaved" else (2, -1)
        parts = tensor.unflatten(1, halves)
        kept = parts[:, columns] if layout == "interleaved" else parts[:, :, columns]
        return kept.flatten(1, 2).contiguous()

    return layer.with_(w13=rows(layer.w13), w13_bias=rows(layer.w13_bias), w2=layer.w2[:, :, columns].contiguous())


def check_sum(parts, layer, lora, adapter_ids, **options):
    """The processes' partial sums add up to the whole layer."""
    total = torch.stack([part.double() for part in parts]).sum(dim=0)
    # Each part is rounded on its own, and they may be larger than their sum.
    check_close(total.to(layer.hidden_states.dtype), oracle(layer, lora, adapter_ids, **options))


@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("bounds", [[0, 4, 8], [0, 1, 2, 8], [0, 8], list(range(9))])
@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_expert_parallel_ranks_add_up(device, dtype, tokens, bounds, shared_outer):
    """F02, F06: even and uneven splits; with a shared outer matrix each pair is still counted once"""
    layer, lora, adapter_ids = make(tokens, device, dtype, shared_outer=shared_outer)
    parts = []
    for start, stop in pairwise(bounds):
        experts = slice(start, stop)
        mine = expert_part(layer, experts)
        place = {"num_experts": 8, "expert_offset": start}
        parts.append(check(mine, lora.shard(experts=experts), adapter_ids, **mine.biases, **place))
    check_sum(parts, layer, lora, adapter_ids, **layer.biases)


def test_local_ids_and_global_ids_give_the_same(device, dtype):
    """F02: rank 1 of 2 with ids of its own 0..3, or with the model's ids and an offset"""
    layer, lora, adapter_ids = make(17, device, dtype)
    experts = slice(4, 8)
    mine, my_lora = expert_part(layer, experts), lora.shard(experts=experts)
    with_global = run(mine, my_lora, adapter_ids, num_experts=8, expert_offset=4)
    with_local = run(mine.with_(topk_ids=layer.topk_ids - 4), my_lora, adapter_ids)
    expected = oracle(mine, my_lora, adapter_ids, num_experts=8, expert_offset=4)
    check_close(with_global, expected)
    check_close(with_local, expected)


def test_an_expert_of_another_process_uses_no_adapter_matrix(device, dtype):
    """F01: -1 does not land on the last expert of the adapter before"""
    layer, lora, _ = make(1, device, dtype, Shape(64, 32, 4, 2), slots=2)
    lora.gate_up_b[0, 3] = 1e4
    lora.down_b[0, 3] = 1e4
    layer = layer.with_(topk_ids=ints([[-1, 2]], device))
    adapter_ids = ints([1], device)
    got = check(layer, lora, adapter_ids)
    only = layer.with_(topk_ids=layer.topk_ids[:, 1:], topk_weights=layer.topk_weights[:, 1:])
    check_close(got, oracle(only, lora, adapter_ids))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("ways", [2, 4])
def test_tensor_parallel_ranks_add_up(device, dtype, ways, shared_outer, layout):
    """F06: the delta is sharded with the base, so that the sum holds it once"""
    layer, lora, adapter_ids = make(9, device, dtype, shared_outer=shared_outer)
    width = SMALL.inter // ways
    parts = []
    for rank in range(ways):
        columns = slice(rank * width, (rank + 1) * width)
        mine = inner_part(layer, columns, layout)
        my_lora = lora.shard(intermediate=columns)
        options = {"w13_bias": mine.w13_bias, "gate_up_layout": layout}
        parts.append(check(mine, my_lora, adapter_ids, **options))
    check_sum(parts, layer, lora, adapter_ids, w13_bias=layer.w13_bias, gate_up_layout=layout)


def test_tensor_and_expert_parallel_shards_tile_the_layer(device, dtype):
    """F03: tp = 4 inside ep = 2, every rank"""
    shape = Shape(32, 96, 4, 2)
    layer, lora, adapter_ids = make(9, device, dtype, shape)
    parts = []
    for ep in range(2):
        experts = slice(2 * ep, 2 * ep + 2)
        for tp in range(4):
            columns = slice(24 * tp, 24 * tp + 24)
            mine = inner_part(expert_part(layer, experts), columns)
            my_lora = lora.shard(experts=experts, intermediate=columns)
            assert my_lora.intermediate_size == 24
            parts.append(run(mine, my_lora, adapter_ids, num_experts=4, expert_offset=2 * ep))
    check_sum(parts, layer, lora, adapter_ids)
    with pytest.raises(ValueError, match="intermediate"):
        lora.shard(intermediate=slice(96, 120))


def test_adapters_below_the_allocated_rank_can_be_sharded(device, dtype):
    """F04: the rank dim is never cut, so padding stays at its end"""
    layer, lora, adapter_ids = make(9, device, dtype, slots=2, rank=16, ranks=[(8, 8), (16, 3)])
    parts = [
        run(inner_part(layer, columns), lora.shard(intermediate=columns), adapter_ids)
        for columns in (slice(0, 16), slice(16, 32))
    ]
    check_sum(parts, layer, lora, adapter_ids)


def test_any_placement_works_through_local_ids(device, dtype):
    """F09: an expert map that is no range; base and adapter experts are picked by the same map"""
    layer, lora, adapter_ids = make(17, device, dtype)
    expert_map = ints([-1, 2, -1, 0, 1, -1, 3, -1], device)  # global to local
    held = [3, 4, 1, 6]
    local = [stack[:, held] for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b)]
    mine = expert_part(layer, held).with_(topk_ids=expert_map[layer.topk_ids.long()])
    got = check(mine, moelora.MoELoRA(*local, lora.scaling), adapter_ids)
    elsewhere = expert_map[layer.topk_ids.long()] < 0
    expected = oracle(layer.with_(topk_ids=torch.where(elsewhere, -1, layer.topk_ids)), lora, adapter_ids)
    check_close(got, expected)
    assert bad_rows(got, oracle(layer, lora, adapter_ids)).numel()


def test_dispatched_rows_carry_their_own_adapter(device, dtype):
    """F10: rows that came over an all-to-all: one expert and one adapter id each, in any order"""
    layer, lora, adapter_ids = make(9, device, dtype)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(6)).to(device)
    source = order // 2
    rows = layer.with_(
        hidden_states=layer.hidden_states[source],
        topk_ids=layer.topk_ids.flatten()[order, None],
        topk_weights=layer.topk_weights.flatten()[order, None],
    )
    got = check(rows, lora, adapter_ids[source])
    combined = torch.zeros(9, SMALL.hidden, dtype=torch.float64, device=device).index_add_(0, source, got.double())
    check_close(combined.to(dtype), oracle(layer, lora, adapter_ids))
