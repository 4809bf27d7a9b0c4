"""Checks of the Python surface that the compiled ops cannot make: Python types, device data under MOELORA_CHECK=1."""

import os

import torch
from torch import Tensor

CHECK_DATA = os.environ.get("MOELORA_CHECK", "0") not in ("", "0")


def expert_ids(topk_ids: Tensor, topk_weights: Tensor | None, num_experts: int) -> None:
    """MOELORA_CHECK=1: every id is -1 or names an expert of the model, and weights are finite. Stops the device."""
    packed = topk_weights is None
    ids = topk_ids.long() >> 16 if packed else topk_ids.long()
    bad = (ids < -1) | (ids >= num_experts)
    if bool(bad.any()):
        raise ValueError(f"topk_ids: expected ids of -1..{num_experts - 1}, got {ids[bad][0].item()}")
    if not packed and not bool(torch.isfinite(topk_weights[ids >= 0]).all()):
        raise ValueError("topk_weights: not finite")


def slots(adapter_ids: Tensor, num_slots: int) -> None:
    """MOELORA_CHECK=1: every adapter id is -1 or names a slot. Stops the device."""
    bad = (adapter_ids < -1) | (adapter_ids >= num_slots)
    if bool(bad.any()):
        raise ValueError(f"adapter_ids: expected ids of -1..{num_slots - 1}, got {adapter_ids[bad][0].item()}")
