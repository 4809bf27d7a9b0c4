"""From updates to the stacks of a `MoELoRA` of one slot."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora.lora import MAX_RANK, MoELoRA, allocated_rank
from moelora.peft.block import DOWN, GATE, UP, Block, Update


def build_adapter(block: Block, updates: list[Update], *, shares_a: bool) -> MoELoRA:
    """Places the updates into zeroed stacks, each part only where there is an update for it.

    With shares_a, gate and up have the same A in every pair, and gate_up_a has R1 rows instead of 2*R1.
    """
    scaling = torch.ones(1, 3, dtype=torch.float32)
    folds = [False] * 3
    for component in (GATE, UP, DOWN):
        scales = {update.scaling for update in updates if update.component == component}
        folds[component] = len(scales) > 1
        if len(scales) == 1:
            scaling[0, component] = scales.pop()
    ranks = torch.zeros(1, 2, dtype=torch.int32)
    experts, hidden, inter = block.num_experts, block.hidden_size, block.intermediate_size
    gate_up_a = gate_up_b = down_a = down_b = None

    gate_up = [update for update in updates if update.component != DOWN]
    if gate_up:
        ranks[0, 0], allocated = _ranks(block, gate_up)
        components = 1 if shares_a else 2
        a = torch.zeros(1, experts, components, allocated, hidden, dtype=block.dtype)
        b = torch.zeros(1, experts, 2, inter, allocated, dtype=block.dtype)
        for update in gate_up:
            place_a = 0 if shares_a else update.component
            a[0, update.expert, place_a, : update.rank] = update.a
            b[0, update.expert, update.component, :, : update.rank] = _scaled_b(update, folds)
        gate_up_a, gate_up_b = a.flatten(2, 3), b.flatten(2, 3)

    down = [update for update in updates if update.component == DOWN]
    if down:
        ranks[0, 1], allocated = _ranks(block, down)
        down_a = torch.zeros(1, experts, allocated, inter, dtype=block.dtype)
        down_b = torch.zeros(1, experts, hidden, allocated, dtype=block.dtype)
        for update in down:
            down_a[0, update.expert, : update.rank] = update.a
            down_b[0, update.expert, :, : update.rank] = _scaled_b(update, folds)
    return MoELoRA(gate_up_a, gate_up_b, down_a, down_b, scaling, ranks)


def _scaled_b(update: Update, folds: list[bool]) -> Tensor:
    return update.b.float() * update.scaling if folds[update.component] else update.b


def _ranks(block: Block, updates: list[Update]) -> tuple[int, int]:
    """The largest rank among the updates of one part, and the rank to allocate for."""
    rank = max(update.rank for update in updates)
    limit = MAX_RANK if block.max_rank is None else block.max_rank
    if rank > limit:
        what = "the largest rank supported" if block.max_rank is None else "max_rank"
        raise ValueError(f"{what} is {limit}, but the file has rank {rank} for {block.path}.experts")
    return rank, allocated_rank(rank if block.max_rank is None else block.max_rank)


def empty_adapter(block: Block) -> MoELoRA:
    """One empty slot with the block's sizes, in the smallest form there is."""
    rank = allocated_rank(1)
    down_a = torch.zeros(1, block.num_experts, rank, block.intermediate_size, dtype=block.dtype)
    down_b = torch.zeros(1, 1, block.hidden_size, rank, dtype=block.dtype)
    return MoELoRA(None, None, down_a, down_b, ranks=torch.zeros(1, 2, dtype=torch.int32))
