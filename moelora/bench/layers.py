"""What is timed: a stack of layers with weights of their own, run by each system on the same data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import moelora
from moelora.bench.grouped_mm import GroupedAdapters, grouped_mm_layer
from moelora.bench.peers_sglang import SglangLayer
from moelora.bench.peers_vllm import VllmLayer
from moelora.bench.shapes import Adapters, BenchShape, floor_us, routing
from moelora.lora import MoELoRA
from moelora.reference import moe_lora_reference
from moelora.testing.errors import row_errors
from moelora.testing.inputs import random_adapter_ids, random_lora

# Weights touched by one replay: several times the 60 MB of L2, so that no layer finds its weights there.
MIN_ROTATED_BYTES = 400e6
# What starts a graph is paid once for all layers of a model, so short layers are timed many at a time.
MIN_REPLAY_US = 500
MAX_LAYERS = 24
MAX_WEIGHT_SHARE = 0.3  # of the GPU's memory


@dataclass
class BenchLayer:
    """One layer: weights, routing, adapters."""

    w13: Tensor
    w2: Tensor
    lora: MoELoRA | None
    grouped: GroupedAdapters | None
    topk_weights: Tensor
    topk_ids: Tensor


class Weights:
    """Base weights and adapters of enough layers to keep L2 cold; shared by all token counts."""

    def __init__(self, shape: BenchShape, adapters: Adapters, dtype: torch.dtype, device: torch.device) -> None:
        layer = shape.layer
        self.shape, self.adapters, self.dtype, self.device = shape, adapters, dtype, device
        expert_bytes = 3 * layer.inter * layer.hidden * 2
        # T = 1 touches about top_k * local share experts a layer.
        touched = max(1, layer.top_k * layer.experts // shape.num_experts) * expert_bytes
        fitting = int(MAX_WEIGHT_SHARE * torch.cuda.mem_get_info(device)[1] / (layer.experts * expert_bytes))
        count = max(2, min(fitting, MAX_LAYERS))
        self.min_layers = min(int(MIN_ROTATED_BYTES / touched) + 1, count)
        self.base = [self._base(seed) for seed in range(count)]
        self.loras = [self._lora(seed) for seed in range(count)]

    def _base(self, seed: int) -> tuple[Tensor, Tensor]:
        layer = self.shape.layer
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            values = torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)
            return values.mul_(size[-1] ** -0.5)

        return normal(layer.experts, 2 * layer.inter, layer.hidden), normal(layer.experts, layer.hidden, layer.inter)

    def _lora(self, seed: int) -> tuple[MoELoRA, GroupedAdapters] | tuple[None, None]:
        if self.adapters.count == 0:
            return None, None
        lora = random_lora(
            self.adapters.count, self.shape.layer, self.adapters.rank, dtype=self.dtype, device=self.device,
            shared_a=True, seed=seed,
        )  # fmt: skip
        lora.scaling.fill_(1.0)
        return lora, GroupedAdapters.of(lora, with_base_rows=self.adapters.mixed)


class Problem:
    """One token count on given weights: inputs, the systems' runs, the floor, and the check against the oracle."""

    def __init__(self, weights: Weights, tokens: int, workspace_limit_bytes: int | None = None) -> None:
        shape, adapters, device = weights.shape, weights.adapters, weights.device
        self.shape, self.adapters, self.tokens = shape, adapters, tokens
        self.workspace_limit_bytes = workspace_limit_bytes
        generator = torch.Generator(device).manual_seed(tokens)
        self.x = torch.randn(tokens, shape.layer.hidden, generator=generator, device=device, dtype=weights.dtype)
        self.adapter_ids = None
        if adapters.count:
            ids = random_adapter_ids(tokens, adapters.count, device=device, seed=tokens)
            self.adapter_ids = ids if adapters.mixed else ids.clamp(min=0)
        self.layers = [
            BenchLayer(*weights.base[i], *weights.loras[i], *routing(shape, tokens, 1000 * tokens + i, device))
            for i in range(len(weights.base))
        ]
        del self.layers[max(weights.min_layers, math.ceil(MIN_REPLAY_US / self.floor_us())) :]
        # Captured graphs write these, so they live as long as the problem; a peer's results are its graph's own.
        self.outs = [torch.empty_like(self.x) for _ in self.layers]
        self.results = list(self.outs)
        # What a peer prepares once per step and once per layer at load, by system: made in its first eager call.
        self.peers: dict[str, VllmLayer | SglangLayer] = {}

    def floor_us(self) -> float:
        floors = [floor_us(self.shape, layer.topk_ids, self.adapters, self.adapter_ids) for layer in self.layers]
        return sum(floors) / len(floors)

    def run_layer(self, system: str) -> Tensor:
        """The first layer once."""
        return SYSTEMS[system](self, self.layers[0], self.outs[0])

    def run(self, system: str) -> None:
        """All layers once, each on the same x."""
        run_layer = SYSTEMS[system]
        self.results = [run_layer(self, layer, out) for layer, out in zip(self.layers, self.outs, strict=True)]

    def error(self) -> float:
        """The worst row of the last run's result against the float32 oracle, of the layer with the most local pairs."""
        local = [int((layer.topk_ids < self.shape.layer.experts).sum()) for layer in self.layers]
        layer_index = local.index(max(local))
        layer = self.layers[layer_index]
        expected = moe_lora_reference(
            self.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, lora=layer.lora,
            adapter_ids=self.adapter_ids, num_experts=self.shape.num_experts, dtype=torch.float32,
        )  # fmt: skip
        return row_errors(self.results[layer_index], expected).max().item()


def _moelora(stream_mode: str) -> Callable:
    def run(problem: Problem, layer: BenchLayer, out: Tensor) -> Tensor:
        return moelora.fused_moe_lora(
            problem.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, lora=layer.lora,
            adapter_ids=problem.adapter_ids, num_experts=problem.shape.num_experts, stream_mode=stream_mode,
            workspace_limit_bytes=problem.workspace_limit_bytes, out=out,
        )  # fmt: skip

    return run


def _grouped_mm(problem: Problem, layer: BenchLayer, out: Tensor) -> Tensor:
    return grouped_mm_layer(
        problem.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, problem.shape.num_experts, layer.grouped,
        problem.adapter_ids,
    )  # fmt: skip


def _peer(system: str, make: type[VllmLayer] | type[SglangLayer]) -> Callable:
    def run(problem: Problem, layer: BenchLayer, out: Tensor) -> Tensor:
        if system not in problem.peers:
            problem.peers[system] = make(problem.shape.num_experts, problem.adapter_ids, problem.adapters.count)
        arguments = (layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, layer.lora)
        return problem.peers[system](problem.x, *arguments)

    return run


SYSTEMS: dict[str, Callable] = {
    "auto": _moelora("auto"),
    "single": _moelora("single"),
    "two": _moelora("two"),
    "grouped_mm": _grouped_mm,
    "vllm": _peer("vllm", VllmLayer),
    "sglang": _peer("sglang", SglangLayer),
}
