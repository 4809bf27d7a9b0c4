"""A small layer with static inputs that a CUDA graph can be captured on, and ways to change what it reads."""

from __future__ import annotations

import torch
from torch import Tensor

import moelora
from moelora.testing.inputs import Shape, random_adapter_ids, random_layer, random_lora

SHAPE = Shape(512, 256, 16, 4)
SLOTS = 3
RANK = 16


class StaticLayer:
    """Inputs at fixed addresses; `refill(seed)` gives them new contents, adapters included."""

    def __init__(self, tokens: int, *, slots: int = SLOTS, device: str = "cuda", seed: int = 0) -> None:
        self.tokens, self.slots, self.device = tokens, slots, device
        self.layer = random_layer(tokens, SHAPE, dtype=torch.bfloat16, device=device, seed=seed)
        self.lora = random_lora(slots, SHAPE, RANK, dtype=torch.bfloat16, device=device, seed=seed)
        self.adapter_ids = random_adapter_ids(tokens, slots, device=device, seed=seed)

    def refill(self, seed: int, *, base_only: bool = False) -> None:
        new = random_layer(self.tokens, SHAPE, dtype=torch.bfloat16, device=self.device, seed=seed)
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            getattr(self.layer, name).copy_(getattr(new, name))
        lora = random_lora(self.slots, SHAPE, RANK, dtype=torch.bfloat16, device=self.device, seed=seed)
        for name in ("gate_up_a", "gate_up_b", "down_a", "down_b", "scaling"):
            getattr(self.lora, name).copy_(getattr(lora, name))
        if base_only:
            self.adapter_ids.fill_(-1)
        else:
            self.adapter_ids.copy_(random_adapter_ids(self.tokens, self.slots, device=self.device, seed=seed))

    def run(self, mode: str, out: Tensor | None = None, *, with_lora: bool = True) -> Tensor:
        lora = {"lora": self.lora, "adapter_ids": self.adapter_ids} if with_lora else {}
        # Not inference_mode: the tests write into outputs.
        with torch.no_grad():
            return moelora.fused_moe_lora(*self.layer.arguments, **lora, stream_mode=mode, out=out)


def capture(run, pool=None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `run()` and the tensor that its replays write."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out
