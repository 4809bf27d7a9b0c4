"""The layer in plain PyTorch, and the adapter terms on their own.

It loops over experts and slots, never over tokens, so that it serves large T as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moelora.lora import MoELoRA
from moelora.reference.routing import unpack_topk_reference
from moelora.weights import split_gate_up


def moe_lora_reference(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    lora: MoELoRA | None = None,
    adapter_ids: Tensor | None = None,
    num_experts: int | None = None,
    expert_offset: int = 0,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    activation_alpha: float = 1.702,
    activation_limit: float = 7.0,
    gate_up_layout: str = "gate_up",
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    gate_up_lora_delta: Tensor | None = None,
    down_lora_delta: Tensor | None = None,
    down_lora_delta_is_weighted: bool = False,
    dtype: torch.dtype | None = torch.float64,
) -> Tensor:
    """What `fused_moe_lora` computes, with the same arguments, as [T, H].

    `dtype` float64 or float32: all maths in that dtype from the inputs as they are, nothing rounded
    on the way (z neither), and the result in that dtype. `dtype=None`: the plain PyTorch path in the
    inputs' own dtype, GEMM outputs, rank vectors, z and the result rounded to it and the rest in fp32:
    the yardstick for the error that a kernel may have.

    Raises:
        ValueError: an unknown activation or layout, a lora whose sizes are not those of the weights,
            two sources for one adapter part, no adapter_ids with several slots, or
            apply_router_weight_on_input with K > 1.
    """
    if topk_weights is None:
        topk_weights, topk_ids = unpack_topk_reference(topk_ids)
    num_tokens, top_k = topk_ids.shape
    num_local, _, hidden = w13.shape
    if lora is not None:
        sizes = (lora.num_experts, lora.hidden_size, lora.intermediate_size)
        if sizes != (num_local, hidden, w2.shape[2]):
            raise ValueError(f"lora: expected the sizes of w13 and w2, got {lora}")
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {top_k}")
    gate_up = _gate_up_components(lora)
    down = _down_component(lora)
    for name, delta, part in (
        ("gate_up", gate_up_lora_delta, gate_up),
        ("down", down_lora_delta, down),
    ):
        if delta is not None and part is not None:
            raise ValueError(f"{name}_lora_delta and a lora with a {name} part exclude each other")
    if num_experts is not None and not 0 <= expert_offset <= num_experts - num_local:
        raise ValueError(
            f"expert_offset: expected 0..{num_experts - num_local} for {num_local} of {num_experts} experts, "
            f"got {expert_offset}"
        )

    arithmetic = _Arithmetic.of(dtype, hidden_states.dtype)
    act = _activation(activation, activation_alpha, activation_limit)
    slots = _token_slots(lora, adapter_ids, num_tokens, hidden_states.device)
    weights = topk_weights.to(arithmetic.accumulate)
    out = torch.zeros(num_tokens, hidden, dtype=arithmetic.accumulate, device=hidden_states.device)
    for expert in range(num_local):
        tokens, chosen = (topk_ids == expert_offset + expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        x = hidden_states[tokens].to(arithmetic.compute)
        w = weights[tokens, chosen, None]
        if apply_router_weight_on_input:
            x = (x.to(arithmetic.accumulate) * w).to(arithmetic.compute)
        gate_up_rows = arithmetic.matmul(x, w13[expert])
        if w13_bias is not None:
            gate_up_rows = gate_up_rows + w13_bias[expert].to(arithmetic.accumulate)
        g, u = split_gate_up(gate_up_rows, gate_up_layout)
        if gate_up is not None:
            g = g + _lora_term(x, slots[tokens], expert, gate_up[0], arithmetic)
            u = u + _lora_term(x, slots[tokens], expert, gate_up[1], arithmetic)
        if gate_up_lora_delta is not None:
            delta = gate_up_lora_delta[tokens, chosen].to(arithmetic.accumulate)
            delta_g, delta_u = delta.chunk(2, dim=-1)
            g, u = g + delta_g, u + delta_u
        z = act(g, u).to(arithmetic.compute)
        y = arithmetic.matmul(z, w2[expert])
        if w2_bias is not None:
            y = y + w2_bias[expert].to(arithmetic.accumulate)
        if down is not None:
            y = y + _lora_term(z, slots[tokens], expert, down, arithmetic)
        output_weight = torch.ones_like(w) if apply_router_weight_on_input else w
        if down_lora_delta is not None:
            delta = down_lora_delta[tokens, chosen].to(arithmetic.accumulate)
            if down_lora_delta_is_weighted:
                out.index_add_(0, tokens, delta)
            else:
                y = y + delta
        out.index_add_(0, tokens, output_weight * y)
    return (routed_scaling_factor * out).to(hidden_states.dtype if dtype is None else dtype)


def gate_up_lora_delta_reference(
    hidden_states: Tensor,
    topk_ids: Tensor,
    lora: MoELoRA,
    adapter_ids: Tensor | None = None,
    *,
    expert_offset: int = 0,
    dtype: torch.dtype | None = torch.float64,
) -> Tensor:
    """The gate_up adapter's term of every pair, [T, K, 2*I] as [gate | up], scaling applied.

    Unweighted, and 0 where a pair is not local or has no adapter. `dtype` as in `moe_lora_reference`.
    """
    components = _gate_up_components(lora)
    if components is None:
        raise ValueError("lora: expected a gate_up part, got none")
    num_tokens, top_k = topk_ids.shape
    rows = hidden_states[:, None].expand(num_tokens, top_k, -1)
    halves = [
        _delta_of_pairs(rows, topk_ids, lora, component, adapter_ids, expert_offset, dtype) for component in components
    ]
    return torch.cat(halves, dim=-1)


def down_lora_delta_reference(
    activation: Tensor,
    topk_ids: Tensor,
    lora: MoELoRA,
    adapter_ids: Tensor | None = None,
    *,
    expert_offset: int = 0,
    dtype: torch.dtype | None = torch.float64,
) -> Tensor:
    """The down adapter's term of every pair, [T, K, H], from the pairs' z, [T, K, I]; scaling applied.

    Unweighted, and 0 where a pair is not local or has no adapter. `dtype` as in `moe_lora_reference`.
    """
    component = _down_component(lora)
    if component is None:
        raise ValueError("lora: expected a down part, got none")
    return _delta_of_pairs(activation, topk_ids, lora, component, adapter_ids, expert_offset, dtype)


class _Arithmetic(NamedTuple):
    """GEMMs round their operands and outputs to `compute`; everything else happens in `accumulate`."""

    compute: torch.dtype
    accumulate: torch.dtype

    @staticmethod
    def of(dtype: torch.dtype | None, input_dtype: torch.dtype) -> _Arithmetic:
        if dtype is not None:
            return _Arithmetic(dtype, dtype)
        return _Arithmetic(input_dtype, torch.promote_types(input_dtype, torch.float32))

    def matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows [n, in] times the transpose of weight [out, in]."""
        return (rows.to(self.compute) @ weight.to(self.compute).T).to(self.accumulate)


class _Component(NamedTuple):
    """One of gate, up and down: a [L, E_loc or 1, R, in], b [L, E_loc or 1, out, R], by slot the rest."""

    a: Tensor
    b: Tensor
    scaling: Tensor
    ranks: list[int]


def _gate_up_components(lora: MoELoRA | None) -> tuple[_Component, _Component] | None:
    if lora is None or lora.gate_up_b is None:
        return None
    ranks = _slot_ranks(lora, 0, lora.gate_up_rank)
    rank, inter = lora.gate_up_rank, lora.intermediate_size
    gate_a = lora.gate_up_a[:, :, :rank]
    up_a = lora.gate_up_a[:, :, -rank:]
    gate_b = lora.gate_up_b[:, :, :inter]
    up_b = lora.gate_up_b[:, :, inter:]
    return (
        _Component(gate_a, gate_b, lora.scaling[:, 0], ranks),
        _Component(up_a, up_b, lora.scaling[:, 1], ranks),
    )


def _down_component(lora: MoELoRA | None) -> _Component | None:
    if lora is None or lora.down_a is None:
        return None
    ranks = _slot_ranks(lora, 1, lora.down_rank)
    return _Component(lora.down_a, lora.down_b, lora.scaling[:, 2], ranks)


def _slot_ranks(lora: MoELoRA, part: int, allocated: int) -> list[int]:
    if lora.ranks is None:
        return [allocated] * lora.num_slots
    return lora.ranks[:, part].clamp(0, allocated).tolist()


def _token_slots(lora: MoELoRA | None, adapter_ids: Tensor | None, num_tokens: int, device: torch.device) -> Tensor:
    if adapter_ids is not None:
        if adapter_ids.shape != (num_tokens,):
            raise ValueError(f"adapter_ids: expected shape [{num_tokens}], got {list(adapter_ids.shape)}")
        return adapter_ids
    if lora is not None and lora.num_slots != 1:
        raise ValueError(f"adapter_ids: expected for a lora of {lora.num_slots} slots, got None")
    return torch.zeros(num_tokens, dtype=torch.int32, device=device)


def _lora_term(rows: Tensor, slots: Tensor, expert: int, component: _Component, arithmetic: _Arithmetic) -> Tensor:
    """scaling * B (A row) for rows [n, in] of one expert, each with the adapter of its slot; [n, out]."""
    a, b, scaling, ranks = component
    delta = torch.zeros(rows.shape[0], b.shape[2], dtype=arithmetic.accumulate, device=rows.device)
    for slot, rank in enumerate(ranks):
        if rank == 0:
            continue
        (mine,) = (slots == slot).nonzero(as_tuple=True)
        # An expert dim of size 1 is the shared outer form. Columns beyond the rank may hold anything.
        slot_a = a[slot, expert if a.shape[1] > 1 else 0, :rank]
        slot_b = b[slot, expert if b.shape[1] > 1 else 0, :, :rank]
        v = arithmetic.matmul(rows[mine], slot_a)
        delta[mine] = scaling[slot].to(arithmetic.accumulate) * arithmetic.matmul(v, slot_b)
    return delta


def _delta_of_pairs(
    rows: Tensor,
    topk_ids: Tensor,
    lora: MoELoRA,
    component: _Component,
    adapter_ids: Tensor | None,
    expert_offset: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """`_lora_term` of every pair: rows [T, K, in] to [T, K, out]."""
    arithmetic = _Arithmetic.of(dtype, rows.dtype)
    num_tokens, top_k = topk_ids.shape
    slots = _token_slots(lora, adapter_ids, num_tokens, rows.device)
    delta = torch.zeros(
        num_tokens,
        top_k,
        component.b.shape[2],
        dtype=rows.dtype if dtype is None else dtype,
        device=rows.device,
    )
    for expert in range(lora.num_experts):
        tokens, chosen = (topk_ids == expert_offset + expert).nonzero(as_tuple=True)
        term = _lora_term(rows[tokens, chosen], slots[tokens], expert, component, arithmetic)
        delta[tokens, chosen] = term.to(delta.dtype)
    return delta


def _activation(name: str, alpha: float, limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "silu":
        return lambda g, u: F.silu(g) * u
    if name == "gelu_tanh":
        return lambda g, u: F.gelu(g, approximate="tanh") * u
    if name == "swigluoai":

        def swigluoai(g: Tensor, u: Tensor) -> Tensor:
            g = g.clamp(max=limit)
            u = u.clamp(-limit, limit)
            return g * torch.sigmoid(alpha * g) * (u + 1)

        return swigluoai
    raise ValueError(f'activation: expected "silu", "gelu_tanh" or "swigluoai", got "{name}"')
