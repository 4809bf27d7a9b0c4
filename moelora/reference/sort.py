"""The sort of pairs by expert and adapter slot, in plain PyTorch and Python."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MoeSortMaps(NamedTuple):
    """What `moe_sort` returns; all int32, on the device of the ids."""

    expanded_to_permuted: Tensor  # [P]: a pair's row, -1 where it is not local
    permuted_to_expanded: Tensor  # [P_max]: a row's pair, -1 for padding
    expert_offsets: Tensor  # [E_loc + 1]: padded rows before each expert
    tile_expert: Tensor  # [P_max / tile_rows]: local expert of a tile, -1 where unused
    tile_row_limit: Tensor  # [P_max / tile_rows]: one past the last real row of the tile's expert
    num_padded_rows: Tensor  # [1]


def max_padded_rows(num_pairs: int, num_local_experts: int, tile_rows: int) -> int:
    """P_max, the least upper bound of the padded rows: as many experts as can each start a tile."""
    full = min(num_local_experts, num_pairs)
    return (full + (num_pairs - full) // tile_rows) * tile_rows


def moe_sort_reference(
    topk_ids: Tensor,
    adapter_ids: Tensor | None = None,
    ranks: Tensor | None = None,
    *,
    num_slots: int = 0,
    num_local_experts: int,
    expert_offset: int = 0,
    tile_rows: int,
) -> MoeSortMaps:
    """Rows for the local pairs of topk_ids [T, K], each expert's padded to a multiple of tile_rows.

    Pairs go by expert, inside an expert by slot (those without an adapter last), inside a slot by pair.
    adapter_ids [T] names the slots; without it every token has slot 0 if there are slots at all. A slot
    of rank 0 on both sides of ranks [L, 2] counts as no adapter.
    """
    num_tokens, top_k = topk_ids.shape
    slots = [0] * num_tokens if adapter_ids is None else adapter_ids.tolist()
    filled = [True] * num_slots if ranks is None else (ranks > 0).any(dim=1).tolist()
    pairs_of: list[list[tuple[int, int]]] = [[] for _ in range(num_local_experts)]
    for pair, expert in enumerate(topk_ids.flatten().tolist()):
        slot = slots[pair // top_k]
        has_adapter = 0 <= slot < num_slots and filled[slot]
        if expert_offset <= expert < expert_offset + num_local_experts:
            pairs_of[expert - expert_offset].append((slot if has_adapter else num_slots, pair))

    num_pairs = num_tokens * top_k
    max_rows = max_padded_rows(num_pairs, num_local_experts, tile_rows)
    expanded_to_permuted = [-1] * num_pairs
    permuted_to_expanded = [-1] * max_rows
    tile_expert = [-1] * (max_rows // tile_rows)
    tile_row_limit = [0] * (max_rows // tile_rows)
    expert_offsets = [0]
    for expert, pairs in enumerate(pairs_of):
        start = expert_offsets[-1]
        for row, (_, pair) in enumerate(sorted(pairs), start):
            expanded_to_permuted[pair] = row
            permuted_to_expanded[row] = pair
        tiles = -(-len(pairs) // tile_rows)
        for tile in range(start // tile_rows, start // tile_rows + tiles):
            tile_expert[tile] = expert
            tile_row_limit[tile] = start + len(pairs)
        expert_offsets.append(start + tiles * tile_rows)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=topk_ids.device)

    return MoeSortMaps(
        int32(expanded_to_permuted),
        int32(permuted_to_expanded),
        int32(expert_offsets),
        int32(tile_expert),
        int32(tile_row_limit),
        int32([expert_offsets[-1]]),
    )
