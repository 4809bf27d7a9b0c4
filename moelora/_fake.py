"""Shape functions of every op, for torch.compile and fake tensors, and the refusal to differentiate.

The `.out` forms write what they are given and return nothing, so their shape functions are empty.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moelora._errors import VALUE_ERROR, require_inference
from moelora.ops import max_padded_rows

_AUTOGRAD = torch.library.Library("moelora", "IMPL")


def _routing(router_logits, top_k, method, *, packed=False, **_):
    shape = (router_logits.shape[0], top_k)
    weights = router_logits.new_empty((0,) if packed else shape, dtype=torch.float32)
    return weights, router_logits.new_empty(shape, dtype=torch.int32)


def _pack_topk(topk_weights, topk_ids):
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


def _unpack_topk(packed):
    return packed.new_empty(packed.shape, dtype=torch.float32), packed.new_empty(packed.shape)


def _moe_sort(topk_ids, adapter_ids, ranks, num_slots, num_local_experts, expert_offset, tile_rows):
    num_pairs = topk_ids.shape[0] * topk_ids.shape[1]
    max_rows = max_padded_rows(num_pairs, num_local_experts, tile_rows)
    tiles = max_rows // tile_rows
    sizes = (num_pairs, max_rows, num_local_experts + 1, tiles, tiles, 1)
    return tuple(topk_ids.new_empty((size,), dtype=torch.int32) for size in sizes)


def _permute(hidden_states, permuted_to_expanded, top_k, row_weights=None):
    return hidden_states.new_empty((permuted_to_expanded.shape[0], hidden_states.shape[1]))


def _grouped_gemm(rows, weight, bias, expert_offsets, tile_expert, tile_row_limit, expected_rows):
    return rows.new_empty((rows.shape[0], weight.shape[1]))


def _lora_shrink(x, lora_a, topk_ids, *_, **__):
    per_token = x.dim() == 2 and lora_a.shape[1] == 1
    rows = topk_ids.shape[0] if per_token else topk_ids.shape[0] * topk_ids.shape[1]
    return x.new_empty((rows, lora_a.shape[2]), dtype=torch.float32)


def _lora_expand(v, lora_b, topk_ids, *_, **__):
    return lora_b.new_empty((*topk_ids.shape, lora_b.shape[2]))


def _activation(
    gate_up, expanded_to_permuted, gate_up_lora_delta, top_k, activation, alpha, limit, layout, lora_input
):
    inner = gate_up.shape[1] // 2
    tokens = expanded_to_permuted.shape[0] // top_k
    by_pair = gate_up.new_empty((tokens, top_k, inner) if lora_input else (0,))
    return gate_up.new_empty((gate_up.shape[0], inner)), by_pair


def _finalize(down, topk_weights, expanded_to_permuted, down_lora_delta, top_k, *_):
    return down.new_empty((expanded_to_permuted.shape[0] // top_k, down.shape[1]))


def _fused_moe_lora(
    hidden_states, w13, w2, topk_weights, topk_ids, *optional, do_finalize=True, gate_up_a=None, down_a=None,
    gate_up_lora_delta=None, **_,
):  # fmt: skip
    tokens, top_k = topk_ids.shape
    hidden, inner = hidden_states.shape[1], w13.shape[1] // 2
    down_output = expanded_to_permuted = lora_input = (0,)
    if not do_finalize:
        down_output = (max_padded_rows(tokens * top_k, w13.shape[0]), hidden)
        expanded_to_permuted = (tokens * top_k,)
        # The optional tensors of the op that bring adapters come by position from the dispatcher.
        given = {index: value for index, value in enumerate(optional, start=5) if isinstance(value, Tensor)}
        adapters = [given.get(_ARGUMENT[name]) for name in ("gate_up_a", "down_a", "gate_up_lora_delta")]
        if any(tensor is not None for tensor in (*adapters, gate_up_a, down_a, gate_up_lora_delta)):
            lora_input = (tokens, top_k, inner)
    return (
        hidden_states.new_empty((tokens, hidden) if do_finalize else (0,)),
        hidden_states.new_empty(down_output),
        hidden_states.new_empty(expanded_to_permuted, dtype=torch.int32),
        hidden_states.new_empty(lora_input),
    )


_ARGUMENT = {
    argument.name: index for index, argument in enumerate(torch.ops.moelora.fused_moe_lora.default._schema.arguments)
}

_SHAPES = {
    "routing": _routing,
    "pack_topk": _pack_topk,
    "unpack_topk": _unpack_topk,
    "moe_sort": _moe_sort,
    "permute": _permute,
    "gate_up_gemm": _grouped_gemm,
    "down_gemm": _grouped_gemm,
    "lora_shrink": _lora_shrink,
    "lora_expand": _lora_expand,
    "activation": _activation,
    "finalize": _finalize,
    "fused_moe_lora": _fused_moe_lora,
}


def _writes_only(*_, **__) -> None:
    return None


def _on_one_device(op: torch._ops.OpOverload, shape_function: Callable) -> Callable:
    """The shape function, refusing mixed devices.

    One "meta" tensor among real ones sends a call here, and nothing would be computed.
    """
    names = [argument.name for argument in op._schema.arguments]

    def checked(*args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        first_name, first = next(iter(tensors.items()))
        for name, tensor in tensors.items():
            if tensor.device != first.device:
                raise RuntimeError(
                    f"{VALUE_ERROR}{name}: expected the device of {first_name} ({first.device}), got {tensor.device}"
                )
        return shape_function(*args, **kwargs)

    return checked


def _without_autograd(op: torch._ops.OpOverload) -> Callable:
    """The op's Autograd kernel: refuses what `require_inference` refuses, then goes on below autograd.

    Ops raise RuntimeErrors, as the compiled code does. Not `torch.library.register_autograd`, which takes no op with
    keyword-only tensors.
    """
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        try:
            require_inference(**{name: value for name, value in given.items() if isinstance(value, Tensor)})
        except ValueError as error:
            raise RuntimeError(f"{VALUE_ERROR}{error}") from None
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return kernel


def register() -> None:
    """Registers the shape functions and the refusal to differentiate, for every op of the loaded library."""
    for name, shape_function in _SHAPES.items():
        packet = getattr(torch.ops.moelora, name)
        torch.library.register_fake(f"moelora::{name}", _on_one_device(packet.default, shape_function))
        torch.library.register_fake(f"moelora::{name}.out", _on_one_device(packet.out, _writes_only))
        _AUTOGRAD.impl(name, _without_autograd(packet.default), "Autograd", with_keyset=True)
