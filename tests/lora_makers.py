"""Random layers and adapters for the tests, and what an adapter adds to the weights, spelled out densely."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.lora import MoELoRA


@dataclass
class Layer:
    """Inputs of one forward: E experts, K chosen per token, distinct ids."""

    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids


def random_layer(
    num_tokens: int = 7,
    num_experts: int = 4,
    top_k: int = 2,
    hidden: int = 16,
    inter: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    return Layer(
        torch.randn(num_tokens, hidden, generator=generator).to(dtype),
        (torch.randn(num_experts, 2 * inter, hidden, generator=generator) / hidden**0.5).to(dtype),
        (torch.randn(num_experts, hidden, inter, generator=generator) / inter**0.5).to(dtype),
        torch.rand(num_tokens, top_k, generator=generator) + 0.1,
        ids.int(),
    )


def random_lora(
    num_slots: int = 1,
    num_experts: int = 4,
    hidden: int = 16,
    inter: int = 8,
    gate_up_rank: int = 4,
    down_rank: int = 4,
    *,
    shared_a: bool = False,
    shared_outer: bool = False,
    ranks: list[list[int]] | None = None,
    padding: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> MoELoRA:
    """Adapters with random scales; rank entries beyond a slot's rank hold `padding`."""
    generator = torch.Generator().manual_seed(seed + 1000)
    outer = 1 if shared_outer else num_experts
    components = 1 if shared_a else 2

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gate_up_a = random(num_slots, outer, components, gate_up_rank, hidden) / hidden**0.5
    gate_up_b = random(num_slots, num_experts, 2 * inter, gate_up_rank)
    down_a = random(num_slots, num_experts, down_rank, inter) / inter**0.5
    down_b = random(num_slots, outer, hidden, down_rank)
    for slot, (rank1, rank2) in enumerate(ranks or []):
        gate_up_a[slot, :, :, rank1:] = padding
        gate_up_b[slot, :, :, rank1:] = padding
        down_a[slot, :, rank2:] = padding
        down_b[slot, :, :, rank2:] = padding
    return MoELoRA(
        gate_up_a.flatten(2, 3).to(dtype),
        gate_up_b.to(dtype),
        down_a.to(dtype),
        down_b.to(dtype),
        0.5 + torch.rand(num_slots, 3, generator=generator),
        None if ranks is None else torch.tensor(ranks, dtype=torch.int32),
    )


def dense_updates(lora: MoELoRA, slot: int = 0) -> tuple[Tensor, Tensor]:
    """What a slot adds to the weights, float64: gate_up [E, 2*I, H] with gate rows first, down [E, H, I]."""
    experts, hidden, inter = lora.num_experts, lora.hidden_size, lora.intermediate_size
    gate_up = torch.zeros(experts, 2 * inter, hidden, dtype=torch.float64)
    down = torch.zeros(experts, hidden, inter, dtype=torch.float64)
    rank1, rank2 = (lora.gate_up_rank, lora.down_rank) if lora.ranks is None else lora.ranks[slot].tolist()
    scale = lora.scaling[slot].double()
    for expert in range(experts):
        if lora.gate_up_b is not None:
            a = lora.gate_up_a[slot, expert if lora.gate_up_a.shape[1] > 1 else 0].double()
            b = lora.gate_up_b[slot, expert].double()
            up_row = 0 if lora.gate_up_a_is_shared else lora.gate_up_rank
            gate_up[expert, :inter] = scale[0] * b[:inter, :rank1] @ a[:rank1]
            gate_up[expert, inter:] = scale[1] * b[inter:, :rank1] @ a[up_row : up_row + rank1]
        if lora.down_a is not None:
            a = lora.down_a[slot, expert].double()
            b = lora.down_b[slot, expert if lora.down_b.shape[1] > 1 else 0].double()
            down[expert] = scale[2] * b[:, :rank2] @ a[:rank2]
    return gate_up, down
