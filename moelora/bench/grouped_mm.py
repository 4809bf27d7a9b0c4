"""The peer that everyone has: the layer composed from torch.nn.functional.grouped_mm and PyTorch ops.

Nothing of moelora's kernels is used. No host syncs, so that it runs in a CUDA graph as the others do. Its rows are
copied once, for the first GEMM; the weighted sum reads the last one's where they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moelora.lora import MoELoRA


class GroupedAdapters(NamedTuple):
    """Adapter stacks laid out once, ahead of time, as [E * groups, m, n] in (expert, slot) order."""

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    groups: int  # slots, plus one for rows without adapter where there are such rows

    @staticmethod
    def of(lora: MoELoRA, with_base_rows: bool) -> GroupedAdapters:
        def by_group(stack: Tensor) -> Tensor:
            if with_base_rows:
                stack = torch.cat([stack, torch.zeros_like(stack[:1])])
            return stack.transpose(0, 1).flatten(0, 1).contiguous()

        stacks = (by_group(stack) for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b))
        return GroupedAdapters(*stacks, groups=lora.num_slots + with_base_rows)


def grouped_mm_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    adapters: GroupedAdapters | None = None,
    adapter_ids: Tensor | None = None,
) -> Tensor:
    """out [T, H], SwiGLU, adapters of scale 1. Pairs that are not local are sorted last and belong to no group."""
    top_k, pairs = topk_ids.shape[1], topk_ids.numel()
    experts = w13.shape[0]
    groups = 1 if adapters is None else adapters.groups
    key = topk_ids
    if num_experts > experts:
        local = (key >= 0) & (key < experts)
        key = torch.where(local, key, experts)
    if groups > 1:
        slot = torch.where(adapter_ids < 0, groups - 1, adapter_ids)
        key = key * groups + slot[:, None]
    sorted_key, order = key.flatten().sort(stable=True)
    edges = torch.arange(1, experts * groups + 1, device=x.device, dtype=key.dtype)
    group_offsets = torch.searchsorted(sorted_key, edges, out_int32=True)
    offsets = group_offsets[groups - 1 :: groups].contiguous()
    # The row of each pair.
    place = torch.empty_like(order).scatter_(0, order, torch.arange(pairs, device=x.device)).view_as(topk_ids)
    # A row more for the pairs that are not local, and of no group either: grouped_mm writes nothing there.
    nowhere = None
    token = order // top_k
    if num_experts > experts:
        nowhere = pairs
        place = torch.where(local, place, nowhere)
        token = F.pad(token, (0, 1))

    rows = x[token]
    gate_up = F.grouped_mm(rows, w13.transpose(1, 2), offs=offsets)
    if adapters is not None:
        gate_up += _lora(rows, adapters.gate_up_a, adapters.gate_up_b, group_offsets)
    gate, up = gate_up.chunk(2, dim=-1)
    z = F.silu(gate).mul_(up)
    y = F.grouped_mm(z, w2.transpose(1, 2), offs=offsets)
    if adapters is not None:
        y += _lora(z, adapters.down_a, adapters.down_b, group_offsets)
    # Gathers, weights and sums (in fp32) in one pass; a copy of y by pair and a bmm of one row each take several.
    weights = topk_weights.to(y.dtype)
    return F.embedding_bag(place, y, mode="sum", per_sample_weights=weights, padding_idx=nowhere)


def _lora(rows: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(F.grouped_mm(rows, a.transpose(1, 2), offs=offsets), b.transpose(1, 2), offs=offsets)
