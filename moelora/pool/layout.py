"""What one slot of a pool holds: sizes and forms of its stacks, which adapters fit, and how one is laid in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moelora.lora import MoELoRA, allocated_rank


class Stacks(NamedTuple):
    """Stacks with the components of gate_up A as a dim of their own; of one slot here, of L slots with a leading L."""

    gate_up_a: Tensor  # [E or 1, 2 or 1, R, H]
    gate_up_b: Tensor  # [E, 2I, R]
    down_a: Tensor  # [E, R, I]
    down_b: Tensor  # [E or 1, H, R]


class LayerAdapter(NamedTuple):
    """One layer of an adapter on the host, known to fit; None for a layer that it leaves alone."""

    lora: MoELoRA | None
    gate_up_rank: int
    down_rank: int
    scaling: Tensor  # [3] fp32


@dataclass(frozen=True)
class SlotLayout:
    """Sizes (of this process's part of the model) and forms of the stacks, the same for all layers."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    max_rank: int
    shared_a: bool
    shared_outer: bool
    dtype: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of `Stacks` of one slot."""
        rank = allocated_rank(self.max_rank)
        experts, hidden, inter = self.num_experts, self.hidden_size, self.intermediate_size
        outer = 1 if self.shared_outer else experts
        return (
            (outer, 1 if self.shared_a else 2, rank, hidden),
            (experts, 2 * inter, rank),
            (experts, rank, inter),
            (outer, hidden, rank),
        )

    def layer_adapter(self, where: str, lora: MoELoRA | None) -> LayerAdapter:
        """`lora` on the host, once it is sure that it fits; `where` names it in errors.

        Raises:
            TypeError: no MoELoRA, or another dtype.
            ValueError: more than one slot, other sizes, a form that the slots have no room for, a rank over max_rank.
        """
        if lora is None:
            return LayerAdapter(None, 0, 0, torch.ones(3))
        if not isinstance(lora, MoELoRA):
            raise TypeError(f"{where}: expected a MoELoRA or None, got {type(lora).__name__}")
        if lora.dtype != self.dtype:
            raise TypeError(f"{where}: expected the pool's dtype {self.dtype}, got {lora.dtype}")
        if lora.num_slots != 1:
            raise ValueError(f"{where}: expected one slot, got {lora.num_slots}")
        for size in ("num_experts", "hidden_size", "intermediate_size"):
            expected, got = getattr(self, size), getattr(lora, size)
            if got != expected:
                raise ValueError(f"{where}: expected {size} {expected}, got {got}")
        self._check_forms(where, lora)
        lora = lora.to("cpu")
        stacked = lora.gate_up_rank or 0, lora.down_rank or 0
        ranks = stacked if lora.ranks is None else tuple(lora.ranks[0].tolist())
        for part, rank, limit in zip(("gate_up", "down"), ranks, stacked, strict=True):
            if not 0 <= rank <= limit:
                raise ValueError(f"{where}: expected a {part} rank of 0..{limit} (its stacks), got {rank}")
            if rank > self.max_rank:
                raise ValueError(f"{where}: expected a {part} rank of at most max_rank {self.max_rank}, got {rank}")
        return LayerAdapter(lora, *ranks, lora.scaling[0].detach())

    def _check_forms(self, where: str, lora: MoELoRA) -> None:
        # The general form holds every adapter; a shared one only those that have it.
        if lora.gate_up_b is not None and self.shared_a and not lora.gate_up_a_is_shared:
            raise ValueError(
                f"{where}: expected one A for gate and up, as the pool was made with shared_a=True, got one for each"
            )
        if self.shared_outer:
            for name, matrix in (("gate_up_a", lora.gate_up_a), ("down_b", lora.down_b)):
                if matrix is not None and matrix.shape[1] != 1:
                    raise ValueError(
                        f"{where}: expected one {name} for all experts, as the pool was made with "
                        f"shared_outer=True, got {matrix.shape[1]}"
                    )


def place(adapter: LayerAdapter, slot: Stacks) -> None:
    """Lays one layer of an adapter into the stacks of one slot; every element is written, zeros beyond the rank."""
    lora, rank1, rank2, _ = adapter
    if rank1:
        # copy_ broadcasts an expert dim or a component dim of size 1.
        a = lora.gate_up_a[0].unflatten(1, (-1, lora.gate_up_rank))
        slot.gate_up_a[:, :, :rank1].copy_(a[:, :, :rank1])
        slot.gate_up_b[:, :, :rank1].copy_(lora.gate_up_b[0, :, :, :rank1])
    if rank2:
        slot.down_a[:, :rank2].copy_(lora.down_a[0, :, :rank2])
        slot.down_b[:, :, :rank2].copy_(lora.down_b[0, :, :, :rank2])
    for padding in (
        slot.gate_up_a[:, :, rank1:],
        slot.gate_up_b[:, :, rank1:],
        slot.down_a[:, rank2:],
        slot.down_b[:, :, rank2:],
    ):
        padding.zero_()
