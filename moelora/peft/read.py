"""From an adapter file's tensors to updates: scaling * B A of gate, up and down, with A on the input side."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moelora.peft.block import DOWN, GATE, LORA_A_SIDES, UP, Block, Update
from moelora.peft.config import AdapterConfig
from moelora.peft.names import BlockNames, ExpertNames, FusedNames
from moelora.weights import split_gate_up

_COMPONENTS = {"gate": GATE, "up": UP, "down": DOWN}


def read_updates(block: Block, config: AdapterConfig, found: BlockNames, read: Callable[[str], Tensor]) -> list[Update]:
    """Reads what was found for the block's experts; `read` gives the tensor of a name.

    Raises:
        ValueError: shapes, ranks or dtypes that do not fit the block and the configuration, or a side of
            lora_A that is unknown or contradicts the widths.
    """
    if found.fused:
        return _read_fused(block, config, found.fused, read)
    if block.lora_a_side == "output":
        raise ValueError(
            'lora_a_side: expected "input" or None for a per-expert file, whose lora_A is always on the '
            'input side, got "output"'
        )
    return [_read_expert(block, config, names, read) for names in found.per_expert]


def _read_expert(block: Block, config: AdapterConfig, names: ExpertNames, read: Callable[[str], Tensor]) -> Update:
    if names.expert >= block.num_experts:
        raise ValueError(f"num_experts is {block.num_experts}, but the file has {names.lora_a}")
    rank = config.rank(names.module_path)
    in_features, out_features = block.features(names.projection)
    a = _read_matrix(read, names.lora_a, (rank, in_features))
    b = _read_matrix(read, names.lora_b, (out_features, rank))
    component = _COMPONENTS[names.projection]
    return Update(component, names.expert, a, b, config.scaling(names.module_path))


class _FusedPair(NamedTuple):
    """lora_A [E*r, a] and lora_B [b, r*E] of the fused gate_up or down parameter."""

    part: str
    names: FusedNames
    lora_a: Tensor
    lora_b: Tensor


def _read_fused(
    block: Block, config: AdapterConfig, found: tuple[FusedNames, ...], read: Callable[[str], Tensor]
) -> list[Update]:
    pairs = [
        _FusedPair(part, names, _read_matrix(read, names.lora_a), _read_matrix(read, names.lora_b))
        for part, names in zip(_adapted_parts(block, config, found), found, strict=True)
    ]
    side = _lora_a_side(block, config, pairs)
    updates = []
    for part, names, lora_a, lora_b in pairs:
        path = _parameter_path(block, part)
        rank, scaling = config.rank(path), config.scaling(path)
        for name, got in ((names.lora_a, lora_a.shape[0]), (names.lora_b, lora_b.shape[1])):
            if got != block.num_experts * rank:
                raise ValueError(
                    f"{name}: expected {block.num_experts} experts * rank {rank} = "
                    f"{block.num_experts * rank} vectors, got {got}"
                )
        # The expert is the slow index in lora_A and the fast one in lora_B.
        a = lora_a.reshape(block.num_experts, rank, -1)
        b = lora_b.reshape(-1, rank, block.num_experts).permute(2, 0, 1)
        if side == "output":
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        if part == "gate_up":
            gate_b, up_b = split_gate_up(b, block.gate_up_layout, dim=1)
            updates.append(Update(GATE, slice(None), a, gate_b, scaling))
            updates.append(Update(UP, slice(None), a, up_b, scaling))
        else:
            updates.append(Update(DOWN, slice(None), a, b, scaling))
    return updates


def _adapted_parts(block: Block, config: AdapterConfig, found: tuple[FusedNames, ...]) -> list[str]:
    """Which of gate_up and down each fused pair is for."""
    if len(found) == 2:
        return ["gate_up", "down"]
    named = [part for part in ("gate_up", "down") if config.adapts_parameter(_parameter_path(block, part))]
    if len(named) != 1:
        raise ValueError(
            f"target_parameters in adapter_config.json: expected one of gate_up_proj and down_proj, as the "
            f"file has one pair for {block.path}.experts, got {' and '.join(named) or 'neither'}"
        )
    return named


def _parameter_path(block: Block, part: str) -> str:
    return f"{block.path}.experts.{part}_proj"


def _lora_a_side(block: Block, config: AdapterConfig, pairs: list[_FusedPair]) -> str:
    """The side, the same for all pairs, that the widths or else the caller put lora_A on."""
    possible = set(LORA_A_SIDES)
    for part, names, lora_a, lora_b in pairs:
        features = block.features(part)
        widths = lora_a.shape[1], lora_b.shape[0]
        if widths not in (features, features[::-1]):
            raise ValueError(
                f"{names.lora_a} and {names.lora_b}: expected the widths of {part}_proj, {features[0]} in "
                f"and {features[1]} out for hidden_size={block.hidden_size} and "
                f"intermediate_size={block.intermediate_size}, got {widths[0]} and {widths[1]}"
            )
        if widths != features:
            possible.discard("input")
        if widths != features[::-1]:
            possible.discard("output")
    if not possible:
        raise ValueError(
            f"{block.path}.experts: expected lora_A on the same side of all pairs, got both in "
            f"{' and '.join(pair.names.lora_a for pair in pairs)}"
        )
    if block.lora_a_side is not None:
        if block.lora_a_side not in possible:
            raise ValueError(
                f'lora_a_side: expected "{possible.pop()}" by the widths in the file, got "{block.lora_a_side}"'
            )
        return block.lora_a_side
    if len(possible) == 2:
        raise ValueError(
            f"lora_a_side: expected, as every pair of {block.path}.experts is square and the file "
            f"(peft_version {config.peft_version}) cannot tell, got None. peft 0.19 and newer put lora_A on "
            'the "input" side of [expert, out, in] parameters and on the "output" side of [expert, in, out] '
            "ones that the module does not declare transposed; peft 0.18 and older do it the other way round"
        )
    return possible.pop()


def _read_matrix(read: Callable[[str], Tensor], name: str, shape: tuple[int, int] | None = None) -> Tensor:
    matrix = read(name)
    if not matrix.is_floating_point():
        raise ValueError(f"{name}: expected a floating point dtype, got {matrix.dtype}")
    if matrix.dim() != 2:
        raise ValueError(f"{name}: expected a matrix, got shape {list(matrix.shape)}")
    if shape is not None and tuple(matrix.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(matrix.shape)}")
    return matrix
