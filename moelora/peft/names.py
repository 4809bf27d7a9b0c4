"""Tensor names of an adapter file: which belong to the experts of a block, and what each of them is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PREFIX = "base_model.model."
_EXPERTS = ".experts."
# Names of gate, up and down in the models with one Linear module per expert and projection.
_PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_FUSED = re.compile(r"(base_layer\.)?lora_([AB])\.weight")
_PER_EXPERT = re.compile(rf"(\d+)\.({'|'.join(_PROJECTIONS)})\.lora_([AB])\.weight")
_SHOWN = 8


@dataclass(frozen=True)
class FusedNames:
    """lora_A and lora_B of one fused 3-D parameter, all experts together."""

    lora_a: str
    lora_b: str


@dataclass(frozen=True)
class ExpertNames:
    """lora_A and lora_B of one projection ("gate", "up" or "down") of one expert, and its module path."""

    expert: int
    projection: str
    module_path: str
    lora_a: str
    lora_b: str


@dataclass(frozen=True)
class BlockNames:
    """What a file holds for a block's experts: fused pairs from the inside out, or per-expert pairs."""

    fused: tuple[FusedNames, ...]
    per_expert: tuple[ExpertNames, ...]

    def __bool__(self) -> bool:
        return bool(self.fused or self.per_expert)


def without_prefix(name: str) -> str:
    """A tensor name or module path without the "base_model.model." that PEFT puts before it."""
    return name.removeprefix(_PREFIX)


def find_block_names(names: Iterable[str], block_path: str) -> BlockNames:
    """Sorts out the tensors of the experts of the block at `block_path`; others are not looked at.

    Raises:
        ValueError: a tensor of the experts that is no plain LoRA matrix or has no partner, or a block
            that has both forms.
    """
    experts_path = block_path + _EXPERTS
    fused: dict[bool, dict[str, str]] = {}
    per_expert: dict[tuple[int, str], dict[str, str]] = {}
    unknown = []
    for name in names:
        path = without_prefix(name)
        if not path.startswith(experts_path):
            continue
        rest = path.removeprefix(experts_path)
        if match := _FUSED.fullmatch(rest):
            fused.setdefault(bool(match[1]), {})[match[2]] = name
        elif match := _PER_EXPERT.fullmatch(rest):
            per_expert.setdefault((int(match[1]), match[2]), {})[match[3]] = name
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"the file has tensors of {block_path}.experts that are not plain LoRA on a known "
            f"projection: {_listing(unknown)}"
        )
    if fused and per_expert:
        raise ValueError(f"the file has both fused and per-expert tensors for {block_path}.experts")
    for pair in [*fused.values(), *per_expert.values()]:
        if len(pair) != 2:
            (lone,) = pair.values()
            raise ValueError(f"the file has {lone} without its lora_A or lora_B partner")
    return BlockNames(_ordered_fused(fused, block_path), _ordered_per_expert(per_expert, experts_path))


def block_paths(names: Iterable[str]) -> list[str]:
    """The paths of the blocks whose experts a file has tensors for, in the order of their layers."""
    paths = {without_prefix(name).split(_EXPERTS)[0] for name in names if _EXPERTS in name}
    return sorted(paths, key=_layer_order)


def _ordered_fused(fused: dict[bool, dict[str, str]], block_path: str) -> tuple[FusedNames, ...]:
    if set(fused) == {True}:
        raise ValueError(f"the file has {block_path}.experts.base_layer.lora_A but no {block_path}.experts.lora_A")
    # PEFT wraps the module once per adapted parameter, so base_layer is the first one.
    return tuple(FusedNames(fused[key]["A"], fused[key]["B"]) for key in sorted(fused, reverse=True))


def _ordered_per_expert(pairs: dict[tuple[int, str], dict[str, str]], experts_path: str) -> tuple[ExpertNames, ...]:
    found: dict[tuple[int, str], ExpertNames] = {}
    for (expert, module), pair in sorted(pairs.items()):
        projection = _PROJECTIONS[module]
        if (expert, projection) in found:
            raise ValueError(
                f"the file has two {projection} projections for expert {expert}: {pair['A']} and "
                f"{found[expert, projection].lora_a}"
            )
        found[expert, projection] = ExpertNames(
            expert, projection, f"{experts_path}{expert}.{module}", pair["A"], pair["B"]
        )
    return tuple(found.values())


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _layer_order(path: str) -> list[tuple[int, str]]:
    """Sorts numbers in a path as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
