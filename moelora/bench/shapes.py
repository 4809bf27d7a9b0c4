"""The layers that are timed, and the floor of each: bytes over the read rate, or flops over the matrix rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.testing.inputs import Shape

# Measured on one NVIDIA H200: reads alone, and a bf16 8192^3 matmul in a burst.
READ_BYTES_PER_US = 4587e3
MATMUL_FLOPS_PER_US = 792e6


@dataclass(frozen=True)
class BenchShape:
    """One model's layer as one process sees it: `layer.experts` are held here, of `num_experts` in all."""

    name: str
    layer: Shape
    num_experts: int
    text: str


BENCH_SHAPES = {
    shape.name: shape
    for shape in (
        BenchShape("S1", Shape(2048, 768, 128, 8), 128, "Qwen3-30B-A3B"),
        BenchShape("S2", Shape(2048, 768, 32, 8), 128, "Qwen3-30B-A3B, 32 experts local (EP4)"),
        BenchShape("S3", Shape(7168, 2048, 32, 8), 256, "DeepSeek-V3, 32 experts local (EP8)"),
        BenchShape("qwen3.5-35b", Shape(2048, 512, 256, 8), 256, "Qwen3.5-35B-A3B"),
        BenchShape("qwen3-235b", Shape(4096, 1536, 128, 8), 128, "Qwen3-235B-A22B"),
        BenchShape("mixtral", Shape(4096, 14336, 8, 2), 8, "Mixtral-8x7B"),
    )
}


@dataclass(frozen=True)
class Adapters:
    """What is served beside the base model: `count` adapters of `rank`, with `mixed` some rows have none."""

    count: int
    rank: int
    mixed: bool = False

    def __str__(self) -> str:
        if self.count == 0:
            return "none"
        return f"{self.count} x r{self.rank}" + (" + base" if self.mixed else "")


def floor_us(shape: BenchShape, topk_ids: Tensor, adapters: Adapters, adapter_ids: Tensor | None) -> float:
    """The time no kernel can beat, µs, for this routing: every byte once, every multiply once.

    Bytes: weights of the experts hit, A and B of the (expert, slot) pairs hit, x and the output.
    """
    layer, element = shape.layer, 2
    tokens = topk_ids.shape[0]
    local = (topk_ids >= 0) & (topk_ids < layer.experts)
    experts_hit = topk_ids[local].unique().numel()
    pairs = int(local.sum())
    expert_weights = 3 * layer.inter * layer.hidden
    size = experts_hit * expert_weights + 2 * tokens * layer.hidden
    flops = 2 * pairs * expert_weights
    if adapters.count:
        slots = adapter_ids[:, None].expand_as(topk_ids).long()
        with_adapter = local & (slots >= 0)
        hit = (slots * layer.experts + topk_ids)[with_adapter].unique().numel()
        # gate and up share one A here, as fused-parameter adapters do.
        adapter_weights = adapters.rank * (2 * layer.hidden + 3 * layer.inter)
        size += hit * adapter_weights
        flops += 2 * int(with_adapter.sum()) * adapter_weights
    return max(size * element / READ_BYTES_PER_US, flops / MATMUL_FLOPS_PER_US)


def routing(shape: BenchShape, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random experts, distinct per token, over the whole model; weights that sum to 1."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(tokens, shape.num_experts, generator=generator, device=device)
    weights, ids = scores.topk(shape.layer.top_k)
    return (weights / weights.sum(-1, keepdim=True)).float(), ids.int()
