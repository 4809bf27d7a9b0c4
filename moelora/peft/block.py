"""The block that an adapter is read for, and the updates that a file holds for its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moelora._errors import choice
from moelora.lora import ADAPTER_DTYPES, MAX_RANK
from moelora.ops import GATE_UP_LAYOUTS
from moelora.peft.names import without_prefix

GATE, UP, DOWN = range(3)
LORA_A_SIDES = {"input": 0, "output": 1}


@dataclass
class Block:
    """The block that an adapter is read for, as the caller describes it."""

    path: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate_up_layout: str
    lora_a_side: str | None
    max_rank: int | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"block_path: expected a str, got {type(self.path).__name__}")
        self.path = without_prefix(self.path)
        for name in ("num_experts", "hidden_size", "intermediate_size"):
            _check_int(name, getattr(self, name))
        if self.max_rank is not None:
            _check_int("max_rank", self.max_rank)
            if self.max_rank > MAX_RANK:
                raise ValueError(f"max_rank: expected at most {MAX_RANK}, got {self.max_rank}")
        choice(self.gate_up_layout, GATE_UP_LAYOUTS, "gate_up_layout")
        if self.lora_a_side is not None:
            choice(self.lora_a_side, LORA_A_SIDES, "lora_a_side")
        if self.dtype not in ADAPTER_DTYPES:
            raise TypeError(f"dtype: expected bfloat16, float16 or float32, got {self.dtype}")

    def features(self, projection: str) -> tuple[int, int]:
        """Input and output width of gate, up, down or the fused gate_up."""
        hidden, inter = self.hidden_size, self.intermediate_size
        widths = {
            "gate": (hidden, inter),
            "up": (hidden, inter),
            "gate_up": (hidden, 2 * inter),
            "down": (inter, hidden),
        }
        return widths[projection]


class Update(NamedTuple):
    """scaling * B A for one component, of one expert (a [r, in], b [out, r]) or of all (a leading [E])."""

    component: int
    expert: int | slice
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def _check_int(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value}")
