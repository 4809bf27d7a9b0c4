"""What `AdapterPool.load` is given, read and checked on the host: one `LayerAdapter` a layer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moelora.lora import MoELoRA
from moelora.peft import load_peft_tensors
from moelora.peft.names import without_prefix
from moelora.pool.layout import LayerAdapter, SlotLayout

Source = str | os.PathLike[str] | tuple[Mapping[str, Tensor], Mapping[str, Any]] | Sequence[MoELoRA | None]


@dataclass(frozen=True)
class Model:
    """The model that adapter files are for, and the part of it that this process holds."""

    blocks: tuple[str, ...]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate_up_layout: str
    experts: slice
    intermediate: slice
    allow_other_blocks: bool


def read_adapter(source: Source, model: Model, layout: SlotLayout, lora_a_side: str | None) -> list[LayerAdapter]:
    """Reads and checks all layers; nothing outside the host's memory is touched.

    Raises:
        FileNotFoundError, OSError, safetensors.SafetensorError: files that cannot be read.
        TypeError, ValueError: whatever does not fit; see `AdapterPool.load`.
    """
    if isinstance(source, (str, os.PathLike)):
        loras = _read_folder(Path(source), model, layout, lora_a_side)
    elif isinstance(source, tuple) and len(source) == 2 and all(isinstance(part, Mapping) for part in source):
        tensors, config = source
        loras = _read_blocks(tensors, tensors.__getitem__, config, model, layout, lora_a_side)
    elif isinstance(source, Sequence):
        if len(source) != len(model.blocks):
            raise ValueError(
                f"source: expected a MoELoRA or None for each of {len(model.blocks)} layers, got {len(source)}"
            )
        loras = source
    else:
        raise TypeError(
            "source: expected a folder, a pair of tensors and configuration, or a MoELoRA for each layer, got "
            f"{type(source).__name__}"
        )
    if all(lora is None for lora in loras):
        raise ValueError("source: expected an adapter for at least one layer, got only None")
    return [layout.layer_adapter(f"source for {block}", lora) for block, lora in zip(model.blocks, loras, strict=True)]


def _read_folder(folder: Path, model: Model, layout: SlotLayout, lora_a_side: str | None) -> list[MoELoRA | None]:
    config_file, tensor_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config_file, tensor_file):
        if not file.is_file():
            raise FileNotFoundError(f"source: expected an adapter folder as PEFT saves it, got no file {file}")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    with safe_open(tensor_file, framework="pt") as file:
        return _read_blocks(file.keys(), file.get_tensor, config, model, layout, lora_a_side)


def _read_blocks(
    names: Iterable[str],
    read: Callable[[str], Tensor],
    config: Mapping[str, Any],
    model: Model,
    layout: SlotLayout,
    lora_a_side: str | None,
) -> list[MoELoRA | None]:
    # A model has tens of thousands of names: they are sorted by block once, not once a layer.
    by_block: dict[str, list[str]] = {}
    for name in names:
        block, separator, _ = without_prefix(name).partition(".experts.")
        if separator:
            by_block.setdefault(block, []).append(name)
    others = [block for block in by_block if block not in model.blocks]
    if len(others) == len(by_block) or (others and not model.allow_other_blocks):
        raise ValueError(
            f"source: expected expert tensors for the pool's layers ({_some(model.blocks)}), got some for "
            f"{_some(others)}"
        )
    loras: list[MoELoRA | None] = []
    for block in model.blocks:
        if block not in by_block:
            loras.append(None)
            continue
        lora = load_peft_tensors(
            {name: read(name) for name in by_block[block]},
            config,
            block,
            num_experts=model.num_experts,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            gate_up_layout=model.gate_up_layout,
            lora_a_side=lora_a_side,
            dtype=layout.dtype,
        )
        if (lora.num_experts, lora.intermediate_size) != (layout.num_experts, layout.intermediate_size):
            lora = lora.shard(experts=model.experts, intermediate=model.intermediate)
        loras.append(lora)
    return loras


def _some(blocks: Sequence[str]) -> str:
    if not blocks:
        return "none"
    return ", ".join(blocks[:4]) + (f" and {len(blocks) - 4} more" if len(blocks) > 4 else "")
