"""moe_sort on the GPU: every test of the CPU, and what only a GPU can show."""

import pytest
import torch
from moe_sort_cases import *  # noqa: F403
from moe_sort_cases import POISON, random_ids, random_slots, sort

import moelora


@pytest.mark.parametrize("num_tokens", [5, 256, 257, 3000, 40_000])
@pytest.mark.parametrize("num_slots", [0, 5])
def test_every_run_gives_the_same_maps(device, num_tokens, num_slots):
    ids = random_ids(num_tokens, 8, 64, device)
    slots = random_slots(num_tokens, num_slots, device) if num_slots else None
    first = sort(ids, adapter_ids=slots, num_slots=num_slots, num_local_experts=64)
    for _ in range(100):
        again = sort(ids, adapter_ids=slots, num_slots=num_slots, num_local_experts=64)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("num_tokens", [16, 2500, 20_000])
def test_a_graph_replay_reads_the_new_ids_and_adapters(device, num_tokens):
    """Captured at the first call for these shapes; the workspace is poisoned between replays."""
    ids = random_ids(num_tokens, 4, 32, device)
    slots = random_slots(num_tokens, 3, device)
    maps = [torch.full_like(value, POISON) for value in moelora.ops.moe_sort(ids, num_local_experts=32)]
    bytes_needed = moelora.ops.moe_sort_workspace_bytes(num_tokens, 32, 3)
    workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.moelora.moe_sort.out(
            ids, slots, None, 3, 32, 0, 16, **dict(zip(moelora.ops.MoeSortResult._fields, maps, strict=True)),
            workspace=workspace,
        )  # fmt: skip
    for seed in range(1, 6):
        ids.copy_(random_ids(num_tokens, 4, 32, device, seed=seed))
        slots.copy_(random_slots(num_tokens, 3, device, seed=seed))
        workspace.fill_(0xA5)
        graph.replay()
        expected = sort(ids, adapter_ids=slots, num_slots=3, num_local_experts=32)
        for one, other in zip(maps, expected, strict=True):
            assert torch.equal(one, other)


def test_a_workspace_that_is_too_small_is_refused(device):
    ids = random_ids(600, 8, 32, device)
    maps = moelora.ops.moe_sort(ids, num_local_experts=32)._asdict()
    workspace = torch.empty(100, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match=r"workspace: expected .* bytes, got 100"):
        torch.ops.moelora.moe_sort.out(ids, None, None, 0, 32, 0, 16, **maps, workspace=workspace)


@pytest.mark.slow
def test_300_million_pairs(device):
    """B02: indices near the end of int32 in bytes and rows."""
    num_tokens, top_k = 37_450_001, 8
    ids = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device).view(num_tokens, top_k) % 7
    maps = moelora.ops.moe_sort(ids, num_local_experts=7)
    rows = maps.expanded_to_permuted.long()
    pairs = torch.arange(num_tokens * top_k, device=device)
    assert torch.equal(maps.permuted_to_expanded[rows].long(), pairs)
    expected = maps.expert_offsets[ids.view(-1).long()].long() + pairs // 7
    assert torch.equal(rows, expected)
