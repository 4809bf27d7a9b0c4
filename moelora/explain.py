"""`moelora.explain`: which path a call takes, with which kernels, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora import _streams
from moelora.lora import MoELoRA


def explain(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    lora: MoELoRA | None = None,
    num_experts: int | None = None,
    apply_router_weight_on_input: bool = False,
    gate_up_lora_delta: Tensor | None = None,
    down_lora_delta: Tensor | None = None,
    do_finalize: bool = True,
    stream_mode: str = "auto",
    workspace_limit_bytes: int | None = None,
    **_: object,
) -> str:
    """One line on the path that `fused_moe_lora` takes for these arguments, its kernel configuration and the reason.

    It says so where the call is cut into chunks of tokens, to keep its workspace under a limit.

    The choice is made from shapes, strides and dtypes alone, so that a captured graph takes it for any contents;
    meta tensors do. On a machine without a GPU it answers for compute capability 9.0.

    Args: as `fused_moe_lora`; those that do not matter are ignored.

    Raises:
        ImportError: the optional module moelora._C is missing (a wheel for another Python version).
    """
    from moelora import _C

    if hidden_states.device.type == "cpu":
        return "decomposed: the CPU runs the ops one by one"
    capability = (9, 0)
    if hidden_states.is_cuda:
        capability = torch.cuda.get_device_capability(hidden_states.device)
    tokens, top_k = topk_ids.shape
    sizes = {
        "num_tokens": tokens,
        "top_k": top_k,
        "hidden_size": hidden_states.shape[1],
        "intermediate_size": w13.shape[1] // 2,
        "num_experts": w13.shape[0] if num_experts is None else num_experts,
        "num_local_experts": w13.shape[0],
        "dtype": str(hidden_states.dtype).removeprefix("torch."),
        "hidden_states_stride": hidden_states.stride(0),
        "w13_expert_stride": w13.stride(0),
        "w13_row_stride": w13.stride(1),
        "w2_expert_stride": w2.stride(0),
        "w2_row_stride": w2.stride(1),
        "weight_on_input": int(apply_router_weight_on_input),
        "do_finalize": int(do_finalize),
        "workspace_limit_bytes": workspace_limit_bytes,
        "has_delta": int(gate_up_lora_delta is not None or down_lora_delta is not None),
        "num_slots": 0 if lora is None else lora.num_slots,
        **_side("gate_up", lora and lora.gate_up_a, lora and lora.gate_up_b),
        **_side("down", lora and lora.down_a, lora and lora.down_b),
    }
    path, config, reason = _C.explain(sizes, stream_mode != "auto", capability == (9, 0))
    if path == "decomposed" and lora is not None:
        two = stream_mode == "two" or (stream_mode == "auto" and tokens <= _streams.two_stream_max_tokens())
        path += " on two streams" if two else " on one stream"
    return f"{path} ({config}): {reason}"


def _side(name: str, a: Tensor | None, b: Tensor | None) -> dict[str, int]:
    if a is None:
        return {f"{name}_rank": 0}
    rank = b.shape[3]
    strides = {}
    for letter, stack in (("a", a), ("b", b)):
        for dim, what in enumerate(("slot", "expert", "row")):
            strides[f"{name}_{letter}_{what}_stride"] = stack.stride(dim)
    return {
        f"{name}_rank": rank,
        f"{name}_components": a.shape[2] // rank,
        f"{name}_a_shared_outer": int(name == "gate_up" and a.shape[1] == 1),
        f"{name}_b_shared_outer": int(name == "down" and b.shape[1] == 1),
        **strides,
    }
