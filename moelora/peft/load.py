"""From an adapter file to the stacks of one MoE block."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moelora.lora import MoELoRA
from moelora.peft.block import Block
from moelora.peft.build import build_adapter, empty_adapter
from moelora.peft.config import AdapterConfig
from moelora.peft.names import block_paths, find_block_names
from moelora.peft.read import read_updates


def load_peft_adapter(
    path: str | os.PathLike[str],
    block_path: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    gate_up_layout: str = "gate_up",
    lora_a_side: str | None = None,
    max_rank: int | None = None,
    allow_empty: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> MoELoRA:
    """Reads a PEFT adapter folder for the experts of one MoE block, as a `MoELoRA` of one slot.

    It understands per-expert modules (gate_proj, up_proj, down_proj or w1, w3, w2) and fused parameters
    (gate_up_proj and down_proj as `target_parameters`), rank_pattern, alpha_pattern and use_rslora.
    Projections and experts that the file lacks have no adapter; tensors of other modules play no part.

    Args:
        path: folder with adapter_config.json and adapter_model.safetensors.
        block_path: the block's module path as the file names it, such as "model.layers.0.mlp".
        num_experts, hidden_size, intermediate_size: sizes of the whole model's block.
        gate_up_layout: row order of the model's fused gate_up parameter, "gate_up", "up_gate" or
            "interleaved"; without meaning for per-expert files.
        lora_a_side: "input" or "output", the side of a fused parameter that lora_A is on. Needed only where
            every pair of the block is square, so that the file cannot tell.
        max_rank: allocate for this rank instead of the largest found, both rounded up to a multiple of 8.
        allow_empty: give an empty slot, rather than an error, where the file has nothing for the block.
        dtype: of the stacks: bfloat16, float16 or float32. The file's tensors are cast once.
        device: where the stacks go.

    A component's scale is in `scaling` where all its experts have the same, else it is multiplied into B in
    fp32 before the cast.

    Raises:
        FileNotFoundError: no such folder, or one of the two files is missing.
        TypeError: an argument of the wrong type, an unsupported dtype.
        ValueError: whatever in the file is not plain LoRA for this block, or does not fit the sizes given.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or os.PathLike, got {type(path).__name__}")
    block = Block(
        block_path,
        num_experts,
        hidden_size,
        intermediate_size,
        gate_up_layout,
        lora_a_side,
        max_rank,
        dtype,
    )
    config_file = Path(path) / "adapter_config.json"
    tensor_file = Path(path) / "adapter_model.safetensors"
    for file in (config_file, tensor_file):
        if not file.is_file():
            raise FileNotFoundError(f"path: expected an adapter folder as PEFT saves it, got no file {file}")
    config = AdapterConfig(json.loads(config_file.read_text(encoding="utf-8")))
    with safe_open(tensor_file, framework="pt") as file:
        lora = _load(block, config, file.keys(), file.get_tensor, allow_empty)
    return lora.to(device)


def load_peft_tensors(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    block_path: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    gate_up_layout: str = "gate_up",
    lora_a_side: str | None = None,
    max_rank: int | None = None,
    allow_empty: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> MoELoRA:
    """`load_peft_adapter` for tensors and a configuration that are in memory already.

    `tensors` has the names that PEFT saves under; `config` is the contents of adapter_config.json. Neither is
    changed. The other arguments, the result and the errors are those of `load_peft_adapter`.
    """
    block = Block(
        block_path,
        num_experts,
        hidden_size,
        intermediate_size,
        gate_up_layout,
        lora_a_side,
        max_rank,
        dtype,
    )
    lora = _load(block, AdapterConfig(config), tensors, tensors.__getitem__, allow_empty)
    return lora.to(device)


def _load(
    block: Block,
    config: AdapterConfig,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    allow_empty: bool,
) -> MoELoRA:
    names = list(names)
    found = find_block_names(names, block.path)
    if not found:
        if allow_empty:
            return empty_adapter(block)
        paths = ", ".join(block_paths(names)) or "none"
        raise ValueError(
            f"block_path: expected a block that the file has expert tensors for, got {block.path!r}; "
            f"blocks in the file: {paths}"
        )
    config.refuse_unless_plain_lora()
    return build_adapter(block, read_updates(block, config, found, read), shares_a=bool(found.fused))
