"""Inputs for tests, benchmarks and `moelora.check`: model shapes, random layers and adapters, poison.

Random values differ by expert, adapter and token, and every term of the layer (base, gate_up adapter, down
adapter, each of the K experts) has about the same size, so that any mix-up changes the result by far more
than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moelora.lora import MoELoRA


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's MoE layer: hidden, intermediate (per process), experts, experts per token."""

    hidden: int
    inter: int
    experts: int
    top_k: int


MODEL_SHAPES = {
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8),
    "qwen3_235b_a22b": Shape(4096, 1536, 128, 8),
    "mixtral_8x7b": Shape(4096, 14336, 8, 2),
    "gpt_oss_20b": Shape(2880, 2880, 32, 4),
    "gpt_oss_120b": Shape(2880, 2880, 128, 4),
    "llama4_scout": Shape(5120, 8192, 16, 1),
    "deepseek_v3": Shape(7168, 2048, 256, 8),
    "qwen3_next_80b": Shape(2048, 512, 512, 10),
}


@dataclass(frozen=True)
class LayerInputs:
    """The positional arguments of `moelora.fused_moe_lora`, and biases that a test may pass on."""

    hidden_states: Tensor  # [T, H]
    w13: Tensor  # [E, 2I, H]
    w2: Tensor  # [E, H, I]
    topk_weights: Tensor | None  # [T, K] fp32
    topk_ids: Tensor  # [T, K] int32
    w13_bias: Tensor  # [E, 2I]
    w2_bias: Tensor  # [E, H]

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        return self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids

    @property
    def biases(self) -> dict[str, Tensor]:
        return {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}

    def with_(self, **changes: Tensor | None) -> LayerInputs:
        return replace(self, **changes)

    def tokens(self, rows: slice | Tensor) -> LayerInputs:
        """The same layer for some of the tokens only."""
        weights = None if self.topk_weights is None else self.topk_weights[rows]
        return self.with_(hidden_states=self.hidden_states[rows], topk_weights=weights, topk_ids=self.topk_ids[rows])


def _generator(device: torch.device | str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_layer(
    tokens: int,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LayerInputs:
    """Random weights; for every token distinct random experts with weights of 0.2 to 1.2."""
    generator = _generator(device, seed)
    hidden, inter, experts = shape.hidden, shape.inter, shape.experts

    def normal(*size: int) -> Tensor:
        # In the model's dtype at once: weights of a whole model in fp32 would not fit beside the tests.
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    scores = torch.rand(tokens, experts, generator=generator, device=device)
    return LayerInputs(
        hidden_states=normal(tokens, hidden),
        w13=normal(experts, 2 * inter, hidden).mul_(hidden**-0.5),
        w2=normal(experts, hidden, inter).mul_(inter**-0.5),
        topk_weights=0.2 + torch.rand(tokens, shape.top_k, generator=generator, device=device),
        topk_ids=scores.argsort(dim=1)[:, : shape.top_k].int(),
        w13_bias=normal(experts, 2 * inter).mul_(0.5),
        w2_bias=normal(experts, hidden).mul_(0.5),
    )


def random_lora(
    slots: int,
    shape: Shape,
    rank: int | tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ranks: list[tuple[int, int]] | None = None,
    shared_a: bool = False,
    shared_outer: bool = False,
    seed: int = 0,
) -> MoELoRA:
    """Adapters whose terms are as large as the base's, each with scales of its own.

    Args:
        rank: R1 and R2, or one number for both.
        ranks: by slot the ranks in use; what lies beyond them in the stacks is NaN. None: R1, R2, and no
            `ranks` tensor.
        shared_a: gate and up share one A.
        shared_outer: one gate_up A and one down B for all experts of a slot.
    """
    generator = _generator(device, seed + 7919)
    rank1, rank2 = rank if isinstance(rank, tuple) else (rank, rank)
    hidden, inter, experts = shape.hidden, shape.inter, shape.experts
    outer = 1 if shared_outer else experts
    components = 1 if shared_a else 2

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    gate_up_a = normal(slots, outer, components, rank1, hidden).mul_(hidden**-0.5)
    gate_up_b = normal(slots, experts, 2 * inter, rank1).mul_(rank1**-0.5)
    down_a = normal(slots, experts, rank2, inter).mul_(inter**-0.5)
    down_b = normal(slots, outer, hidden, rank2).mul_(rank2**-0.5)
    for slot, (used1, used2) in enumerate(ranks or []):
        gate_up_a[slot, :, :, used1:] = torch.nan
        gate_up_b[slot, :, :, used1:] = torch.nan
        down_a[slot, :, used2:] = torch.nan
        down_b[slot, :, :, used2:] = torch.nan
    scaling = 0.75 + 1.5 * torch.rand(slots, 3, generator=generator, device=device)
    used = None if ranks is None else torch.tensor(ranks, dtype=torch.int32, device=device)
    return MoELoRA(gate_up_a.flatten(2, 3), gate_up_b, down_a, down_b, scaling, used)


def random_adapter_ids(tokens: int, slots: int, *, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """int32 [T]: every slot and -1 (no adapter) about equally often."""
    generator = _generator(device, seed + 104729)
    return torch.randint(-1, slots, (tokens,), generator=generator, device=device, dtype=torch.int32)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every torch allocation inside starts as NaN (floats) or as the largest value (integers; bytes: 255).

    So an element that a kernel forgot to write shows, and reading scratch before writing it does too.
    """
    # Not torch.use_deterministic_algorithms, which imports the whole compiler.
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
