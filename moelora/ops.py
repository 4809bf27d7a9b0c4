"""The ops of moelora, one typed function each: shapes, checks, allocation, then `torch.ops.moelora.*`.

Every function allocates its result through torch's allocator and calls the op's `.out` form, so that an allocation that
fails raises `torch.OutOfMemoryError`. The ops are for inference: none has a backward. Errors: TypeError for a wrong
dtype or Python type, ValueError for everything else, naming the argument. docs/ops.md explains the schemas.

Letters: T tokens, K experts per token, P = T*K pairs (pair t*K + k is the "expanded index"), E_loc experts held here,
H hidden size, I intermediate size, L adapter slots, R the rank a stack is allocated for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moelora._errors import call, choice, require_inference, require_positive, require_tensor

ROUTING_METHODS = {
    "softmax": 0,
    "renormalize": 1,
    "renormalize_naive": 2,
    "deepseek_v3": 3,
    "llama4": 4,
    "topk": 5,
    "sigmoid": 6,
}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swigluoai": 2}
GATE_UP_LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}
LORA_PARTS = {"gate_up": 0, "down": 1}

# Rows that every expert's rows are padded to. 16 is the smallest token tile of the tensor cores' N side, so that an
# expert with one token costs 16 rows at most and no tile choice leaks into shapes.
TILE_ROWS = 16


class MoeSortResult(NamedTuple):
    """Index maps of `moe_sort`, all int32 on the inputs' device."""

    expanded_to_permuted: Tensor
    """[P] permuted row of each pair, -1: not local."""
    permuted_to_expanded: Tensor
    """[P_max] pair of each permuted row, -1: padding."""
    expert_offsets: Tensor
    """[E_loc + 1] padded rows before each expert."""
    tile_expert: Tensor
    """[P_max / tile_rows] local expert of each tile, -1: unused."""
    tile_row_limit: Tensor
    """[P_max / tile_rows] one past the last real row of the tile's expert, 0: unused."""
    num_padded_rows: Tensor
    """[1] rows in use, padding included."""


def max_padded_rows(num_pairs: int, num_local_experts: int, tile_rows: int = TILE_ROWS) -> int:
    """P_max: the most rows that sorting `num_pairs` pairs can need, from shapes alone."""
    used = torch.sym_min(num_pairs, num_local_experts)
    return (used + (num_pairs - used) // tile_rows) * tile_rows


def moe_sort_workspace_bytes(num_tokens: int, num_local_experts: int, num_slots: int) -> int:
    """Scratch bytes of `moe_sort` on CUDA; csrc/moe_sort/moe_sort.h holds the same formula."""
    return 8 * num_tokens + 512 * (num_local_experts + num_slots + 1)


def routing(
    router_logits: Tensor,
    top_k: int,
    method: str = "renormalize",
    *,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    num_valid_tokens: Tensor | None = None,
    packed: bool = False,
    replay_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses `top_k` experts per token. `moelora.route` is the checked, friendlier form.

    Args:
        router_logits: [T, E] bf16, fp16 or fp32, last dim contiguous.
        replay_ids: [T, K] int16 or int32, receives the chosen ids (routing replay).

    Returns:
        topk_weights [T, K] fp32 and topk_ids [T, K] int32, in descending order of the selection key; with `packed`
        an empty tensor and the packed words [T, K] int32.
    """
    require_tensor(router_logits, "router_logits", 2)
    require_positive(top_k=top_k)
    require_inference(router_logits=router_logits, correction_bias=correction_bias)
    shape = (router_logits.shape[0], top_k)
    device = router_logits.device
    weights = torch.empty((0,) if packed else shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    call(
        torch.ops.moelora.routing.out, router_logits, top_k, choice(method, ROUTING_METHODS, "method"),
        correction_bias=correction_bias, n_group=n_group, topk_group=topk_group, renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor, num_valid_tokens=num_valid_tokens, packed=packed,
        topk_weights=weights, topk_ids=ids, replay_ids=replay_ids,
    )  # fmt: skip
    return weights, ids


def pack_topk(topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """(id << 16) | bf16 bits of the weight, [T, K] int32 (the packed form of FlashInfer and TRT-LLM).

    Args:
        topk_weights: [T, K] fp32 or bf16.
        topk_ids: [T, K] int32 or int64; ids outside -1..32767 become -1.
    """
    require_tensor(topk_weights, "topk_weights", 2)
    require_tensor(topk_ids, "topk_ids", 2)
    require_inference(topk_weights=topk_weights)
    out = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    call(torch.ops.moelora.pack_topk.out, topk_weights, topk_ids, out=out)
    return out


def unpack_topk(packed: Tensor) -> tuple[Tensor, Tensor]:
    """topk_weights [T, K] fp32 and topk_ids [T, K] int32 of the packed form [T, K] int32."""
    require_tensor(packed, "packed", 2)
    weights = torch.empty(packed.shape, dtype=torch.float32, device=packed.device)
    ids = torch.empty(packed.shape, dtype=torch.int32, device=packed.device)
    call(torch.ops.moelora.unpack_topk.out, packed, topk_weights=weights, topk_ids=ids)
    return weights, ids


def moe_sort(
    topk_ids: Tensor,
    *,
    adapter_ids: Tensor | None = None,
    ranks: Tensor | None = None,
    num_slots: int = 0,
    num_local_experts: int,
    expert_offset: int = 0,
    tile_rows: int = TILE_ROWS,
) -> MoeSortResult:
    """Groups the local pairs by expert, inside an expert by adapter slot (none last), inside a slot by pair.

    Args:
        topk_ids: [T, K] int32 or int64 global ids; ids outside expert_offset..expert_offset+E_loc-1 are not local.
        adapter_ids: [T] int32 or int64, needed with more than one slot.
        ranks: [L, 2] int32; a slot whose two ranks are 0 counts as no adapter.
        num_slots: L; 0 sorts by expert alone.
        tile_rows: each expert's rows are padded to a multiple of this.
    """
    require_tensor(topk_ids, "topk_ids", 2)
    require_positive(num_local_experts=num_local_experts, tile_rows=tile_rows)
    num_pairs = topk_ids.shape[0] * topk_ids.shape[1]
    max_rows = max_padded_rows(num_pairs, num_local_experts, tile_rows)
    device = topk_ids.device

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    result = MoeSortResult(
        expanded_to_permuted=empty(num_pairs),
        permuted_to_expanded=empty(max_rows),
        expert_offsets=empty(num_local_experts + 1),
        tile_expert=empty(max_rows // tile_rows),
        tile_row_limit=empty(max_rows // tile_rows),
        num_padded_rows=empty(1),
    )
    scratch = 0
    if device.type == "cuda":
        scratch = moe_sort_workspace_bytes(topk_ids.shape[0], num_local_experts, num_slots)
    call(
        torch.ops.moelora.moe_sort.out, topk_ids, adapter_ids, ranks, num_slots, num_local_experts, expert_offset,
        tile_rows, **result._asdict(), workspace=torch.empty(scratch, dtype=torch.uint8, device=device),
    )  # fmt: skip
    return result


def permute(
    hidden_states: Tensor, permuted_to_expanded: Tensor, top_k: int, row_weights: Tensor | None = None
) -> Tensor:
    """Gathers rows of hidden_states [T, H] into permuted order [P_max, H]; rows of padding stay unwritten.

    Args:
        hidden_states: bf16, fp16 (fp32 on CPU), last dim contiguous, row stride a multiple of 8.
        row_weights: [T, K] router weights to multiply the rows with (weight-on-input models), rounded once.
    """
    require_tensor(hidden_states, "hidden_states", 2)
    require_tensor(permuted_to_expanded, "permuted_to_expanded", 1)
    require_inference(hidden_states=hidden_states, row_weights=row_weights)
    out = hidden_states.new_empty((permuted_to_expanded.shape[0], hidden_states.shape[1]))
    call(torch.ops.moelora.permute.out, hidden_states, permuted_to_expanded, top_k, row_weights, out=out)
    return out


def gate_up_gemm(
    permuted: Tensor, w13: Tensor, sort: MoeSortResult, *, w13_bias: Tensor | None = None, expected_rows: int
) -> Tensor:
    """gate_up rows [P_max, 2I] = w13[e] x + w13_bias[e] for every real row; columns in w13's row order.

    Args:
        permuted: [P_max, H] from `permute`.
        w13: [E_loc, 2I, H], last dim contiguous, outer strides multiples of 8.
        w13_bias: [E_loc, 2I].
        expected_rows: rows an expert gets on average, from shapes alone; it picks the token tile, not the result.
    """
    return _grouped_gemm(torch.ops.moelora.gate_up_gemm.out, ("permuted", "w13", "w13_bias"), permuted, w13,
                         w13_bias, sort, expected_rows)  # fmt: skip


def down_gemm(
    z: Tensor, w2: Tensor, sort: MoeSortResult, *, w2_bias: Tensor | None = None, expected_rows: int
) -> Tensor:
    """down rows [P_max, H] = w2[e] z + w2_bias[e] for every real row.

    Args:
        z: [P_max, I] from `activation`.
        w2: [E_loc, H, I], last dim contiguous, outer strides multiples of 8.
        w2_bias: [E_loc, H].
        expected_rows: as in `gate_up_gemm`.
    """
    return _grouped_gemm(torch.ops.moelora.down_gemm.out, ("z", "w2", "w2_bias"), z, w2, w2_bias, sort,
                         expected_rows)  # fmt: skip


def _grouped_gemm(op, names, rows, weight, bias, sort, expected_rows) -> Tensor:
    require_tensor(rows, names[0], 2)
    require_tensor(weight, names[1], 3)
    require_inference(**dict(zip(names, (rows, weight, bias), strict=True)))
    out = rows.new_empty((rows.shape[0], weight.shape[1]))
    call(op, rows, weight, bias, sort.expert_offsets, sort.tile_expert, sort.tile_row_limit, expected_rows, out=out)
    return out


def lora_shrink(
    x: Tensor,
    lora_a: Tensor,
    topk_ids: Tensor,
    *,
    adapter_ids: Tensor | None = None,
    ranks: Tensor | None = None,
    rank: int,
    part: str,
    num_local_experts: int,
    expert_offset: int = 0,
    sort: MoeSortResult | None = None,
) -> Tensor:
    """Rank vectors v = A x, fp32: [P, C*R] by pair, or [T, C*R] where A is shared outer and x is per token.

    Zero where a pair has no adapter, is not local, or the row lies beyond the slot's rank.

    Args:
        x: [T, in] per token, or [T, K, in] by pair.
        lora_a: [L, E_loc or 1, C*R, in]; C = 2 where gate and up have their own A.
        rank: R.
        part: "gate_up" or "down": the column of `ranks` that holds.
        sort: the maps of `moe_sort` with num_slots = L; with them, many pairs run as a grouped GEMM.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        require_tensor(x, "x", 2)
    require_tensor(lora_a, "lora_a", 4)
    require_tensor(topk_ids, "topk_ids", 2)
    require_inference(x=x, lora_a=lora_a)
    per_token = x.dim() == 2 and lora_a.shape[1] == 1
    rows = topk_ids.shape[0] if per_token else topk_ids.shape[0] * topk_ids.shape[1]
    v = torch.empty((rows, lora_a.shape[2]), dtype=torch.float32, device=x.device)
    call(
        torch.ops.moelora.lora_shrink.out, x, lora_a, topk_ids, adapter_ids, ranks, rank,
        choice(part, LORA_PARTS, "part"), num_local_experts, expert_offset, *_lora_maps(sort), out=v,
    )  # fmt: skip
    return v


def lora_expand(
    v: Tensor,
    lora_b: Tensor,
    topk_ids: Tensor,
    *,
    adapter_ids: Tensor | None = None,
    ranks: Tensor | None = None,
    scaling: Tensor | None = None,
    row_weights: Tensor | None = None,
    part: str,
    num_local_experts: int,
    expert_offset: int = 0,
    sort: MoeSortResult | None = None,
) -> Tensor:
    """delta [T, K, N] = scaling * B v by pair, in lora_b's dtype; zeros where a pair has no adapter or is not local.

    Args:
        v: [P or T, C*R] from `lora_shrink`.
        lora_b: [L, E_loc or 1, N, R]. For "gate_up", N = 2I: gate columns use the first R columns of v and up columns
            the last R.
        scaling: [L, 3] fp32 (gate, up, down); None: 1.
        row_weights: [T, K] router weights that multiply the delta (weight-on-input models).
        part: "gate_up" or "down".
    """
    require_tensor(v, "v", 2)
    require_tensor(lora_b, "lora_b", 4)
    require_tensor(topk_ids, "topk_ids", 2)
    require_inference(v=v, lora_b=lora_b, scaling=scaling, row_weights=row_weights)
    delta = lora_b.new_empty((*topk_ids.shape, lora_b.shape[2]))
    call(
        torch.ops.moelora.lora_expand.out, v, lora_b, topk_ids, adapter_ids, ranks, scaling, row_weights,
        choice(part, LORA_PARTS, "part"), num_local_experts, expert_offset, *_lora_maps(sort), out=delta,
    )  # fmt: skip
    return delta


def _lora_maps(sort: MoeSortResult | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if sort is None:
        return None, None, None
    return sort.permuted_to_expanded, sort.tile_expert, sort.tile_row_limit


def activation(
    gate_up: Tensor,
    expanded_to_permuted: Tensor,
    top_k: int,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_layout: str = "gate_up",
    gate_up_lora_delta: Tensor | None = None,
    lora_input: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """z = act(gate + delta, up + delta) in fp32, one rounding.

    Args:
        gate_up: [P_max, 2I] from `gate_up_gemm`.
        gate_up_lora_delta: [T, K, 2I], always [gate | up] by pair.
        alpha, limit: of "swigluoai" (gpt-oss).
        lora_input: also return z by pair.

    Returns:
        z [P_max, I] by permuted row (rows of padding unwritten), and activation_lora_input [T, K, I] by pair, exactly
        0 for pairs that are not local, or None.
    """
    require_tensor(gate_up, "gate_up", 2)
    require_tensor(expanded_to_permuted, "expanded_to_permuted", 1)
    require_positive(top_k=top_k)
    require_inference(gate_up=gate_up, gate_up_lora_delta=gate_up_lora_delta)
    inner = gate_up.shape[1] // 2
    z = gate_up.new_empty((gate_up.shape[0], inner))
    by_pair = gate_up.new_empty((expanded_to_permuted.shape[0] // top_k, top_k, inner)) if lora_input else None
    call(
        torch.ops.moelora.activation.out, gate_up, expanded_to_permuted, gate_up_lora_delta, top_k,
        choice(activation, ACTIVATIONS, "activation"), alpha, limit,
        choice(gate_up_layout, GATE_UP_LAYOUTS, "gate_up_layout"), z=z, activation_lora_input=by_pair,
    )  # fmt: skip
    return z, by_pair


def finalize(
    down: Tensor,
    topk_weights: Tensor | None,
    expanded_to_permuted: Tensor,
    *,
    top_k: int,
    down_lora_delta: Tensor | None = None,
    delta_is_weighted: bool = False,
    routed_scaling_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """out [T, H] = routed_scaling_factor * sum over k of w * (down row + delta), fp32, k ascending, one rounding.

    Args:
        down: [P_max, H] from `down_gemm`.
        topk_weights: [T, K] fp32 or bf16; None: 1 (weight-on-input models).
        down_lora_delta: [T, K, H] by pair.
        delta_is_weighted: the delta already holds w (vLLM's form).
        out: written instead of a fresh tensor; last dim contiguous, row stride a multiple of 8.
    """
    require_tensor(down, "down", 2)
    require_tensor(expanded_to_permuted, "expanded_to_permuted", 1)
    require_positive(top_k=top_k)
    require_inference(down=down, topk_weights=topk_weights, down_lora_delta=down_lora_delta)
    if out is None:
        out = down.new_empty((expanded_to_permuted.shape[0] // top_k, down.shape[1]))
    call(
        torch.ops.moelora.finalize.out, down, topk_weights, expanded_to_permuted, down_lora_delta, top_k,
        delta_is_weighted, routed_scaling_factor, out=out,
    )  # fmt: skip
    return out
