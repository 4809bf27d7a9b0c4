"""The MoE-LoRA forwards: one op call each, after what Python has to do (allocation, streams, Python types)."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moelora import _checks, _streams
from moelora._errors import call, choice, require_inference, require_tensor
from moelora.lora import MoELoRA
from moelora.ops import ACTIVATIONS, GATE_UP_LAYOUTS, max_padded_rows

Unfinished = tuple[Tensor, Tensor | None, Tensor, Tensor | None]

# The op's path codes: 0 takes a fused path where there is one, 1 is the decomposed pipeline, on two streams where it is
# given a side stream.
_PATHS = {"auto": 0, "single": 1, "two": 1}
# What the op gets where there is no lora: its stacks, scaling and ranks; its sizes; the stream and event handles.
_NO_LORA = (None,) * 6
_NO_LORA_SIZES = (0, 0, 1, False, 0)
_NO_STREAMS = (0,) * 5


def fused_moe_lora(
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
    lora_ready_event: torch.cuda.Event | None = None,
    down_lora_delta: Tensor | None = None,
    down_lora_delta_is_weighted: bool = False,
    down_gemm_done_event: torch.cuda.Event | None = None,
    do_finalize: bool = True,
    stream_mode: str = "auto",
    workspace_limit_bytes: int | None = None,
    out: Tensor | None = None,
) -> Tensor | Unfinished:
    """One MoE layer with LoRA adapters on its experts.

    For token t with adapter slot s, each chosen expert e and its weight w:

        g = Wg[e] x + bg[e] + scaling[s, 0] * Bg[s, e] Ag[s, e] x      (u alike with up)
        z = act(g, u)
        y = W2[e] z + b2[e] + scaling[s, 2] * Bd[s, e] Ad[s, e] z
        out[t] = routed_scaling_factor * sum of w * y

    Inference only. All sums are fp32; the model's dtype is bf16 or fp16 (fp32 on CPU). A call allocates its workspace
    through torch, reads nothing back to the host, and can be captured in a CUDA graph.

    Args:
        hidden_states: x [T, H]; last dim contiguous, row stride a multiple of 8.
        w13: [E_loc, 2I, H], rows ordered as `gate_up_layout` says. Used in place, as are all weights.
        w2: [E_loc, H, I].
        topk_weights: [T, K] fp32 or bf16, from `moelora.route`; None with packed `topk_ids`.
        topk_ids: [T, K] int32 or int64 global expert ids, or the packed form [T, K] int32. An id outside
            expert_offset..expert_offset+E_loc-1 (so also -1) contributes exactly 0.
        lora: the adapters; None is a plain MoE at no extra cost.
        adapter_ids: [T] int32 or int64 slot of each token; outside 0..L-1 (so also -1): no adapter. None with L = 1:
            slot 0 for every token.
        num_experts: E, experts of the whole model; default E_loc.
        expert_offset: global id of the first expert held here (expert parallelism). The output is this process's
            partial sum.
        w13_bias: [E_loc, 2I] in w13's row order.
        w2_bias: [E_loc, H].
        activation: "silu" (SwiGLU), "gelu_tanh" (GeGLU) or "swigluoai" (gpt-oss: clamped by `activation_limit`,
            sigmoid sharpened by `activation_alpha`).
        gate_up_layout: "gate_up", "up_gate" or "interleaved" rows of w13. Adapters and deltas are always [gate | up].
        apply_router_weight_on_input: w multiplies x before the expert and y is not weighted (Llama 4; K = 1).
        routed_scaling_factor: multiplies the output once.
        gate_up_lora_delta: [T, K, 2I] by pair, unweighted, instead of the lora's gate_up part.
        lora_ready_event: waited for on the current stream right before `gate_up_lora_delta` is read. A graph of
            torch.compile or torch.export cannot hold it, which is an error that names it; without `fullgraph=True`,
            torch.compile leaves such a call out of its graphs.
        down_lora_delta: [T, K, H] by pair, instead of the lora's down part.
        down_lora_delta_is_weighted: it already contains w (vLLM's form).
        down_gemm_done_event: recorded right after the down GEMM; under torch.compile as `lora_ready_event`.
        do_finalize: False returns before the weighted sum, see Returns.
        stream_mode: "single" and "two" are the decomposed pipeline on one stream and on two (the adapter's work beside
            the base GEMMs), with the same bits; "auto" takes the fastest path there is. CPU always runs single.
        workspace_limit_bytes: bounds the memory that the call takes besides its output: more than 2048 tokens are run
            in chunks that share it, each with the kernels of its own size. A limit that not even the smallest chunks
            can keep is a ValueError that says the least that works. None: only the fused prefill is cut, at 2 GiB. Not
            with do_finalize=False, whose outputs are of the whole batch.
        out: [T, H], written instead of a fresh tensor; may not overlap an input.

    Returns:
        out [T, H]; or with do_finalize=False (down_output [P_max, H] = W2 z + b2 by permuted row without the down
        adapter, topk_weights as given, expanded_to_permuted [T*K] int32, activation_lora_input [T, K, I] or None
        without lora and delta).

    Raises:
        TypeError: a wrong dtype or Python type.
        ValueError: anything else that is wrong with an argument, named in the message, before any launch.
        torch.OutOfMemoryError: an allocation failed; nothing is half-written.
    """
    require_tensor(hidden_states, "hidden_states", 2)
    require_tensor(w13, "w13", 3)
    require_tensor(w2, "w2", 3)
    require_tensor(topk_ids, "topk_ids", 2)
    if lora is not None and not isinstance(lora, MoELoRA):
        raise TypeError(f"lora: expected a MoELoRA or None, got {type(lora).__name__}")
    if torch.is_grad_enabled():
        stacks = {} if lora is None else lora.stacks()
        require_inference(
            hidden_states=hidden_states, w13=w13, w2=w2, topk_weights=topk_weights, w13_bias=w13_bias,
            w2_bias=w2_bias, gate_up_lora_delta=gate_up_lora_delta, down_lora_delta=down_lora_delta, **stacks,
        )  # fmt: skip
    _check_event("lora_ready_event", lora_ready_event)
    _check_event("down_gemm_done_event", down_gemm_done_event)
    if out is not None and not do_finalize:
        raise ValueError("out: has no use with do_finalize=False")
    local_experts = w13.shape[0]
    num_experts = local_experts if num_experts is None else num_experts
    if _checks.CHECK_DATA:
        _checks.expert_ids(topk_ids, topk_weights, num_experts)
        if lora is not None and adapter_ids is not None:
            _checks.slots(adapter_ids, lora.num_slots)
    # Positional, in the schema's order: an eager decode call is bound by the host, and names cost more than values.
    arguments = (
        hidden_states, w13, w2, topk_weights, topk_ids, num_experts, expert_offset,
        choice(activation, ACTIVATIONS, "activation"), activation_alpha, activation_limit,
        choice(gate_up_layout, GATE_UP_LAYOUTS, "gate_up_layout"), apply_router_weight_on_input,
        routed_scaling_factor, choice(stream_mode, _PATHS, "stream_mode"),
        *(_NO_LORA if lora is None else lora.op_arguments()), None if lora is None else adapter_ids,
        w13_bias, w2_bias, gate_up_lora_delta, down_lora_delta, down_lora_delta_is_weighted, workspace_limit_bytes,
    )  # fmt: skip
    if do_finalize and torch.compiler.is_compiling():
        # The functional op allocates inside, so that one graph holds for every T.
        result = torch.ops.moelora.fused_moe_lora(*arguments)[0]
        return result if out is None else out.copy_(result)
    if not do_finalize:
        has_lora_input = lora is not None or gate_up_lora_delta is not None
        if torch.compiler.is_compiling():
            _, down_output, rows, lora_input = torch.ops.moelora.fused_moe_lora(*arguments, do_finalize=False)
            return down_output, topk_weights, rows, lora_input if has_lora_input else None

    tokens, top_k = topk_ids.shape
    hidden, inner = hidden_states.shape[1], w13.shape[1] // 2
    cuda = hidden_states.is_cuda
    workspace_bytes = call(
        _workspace_bytes, tokens, top_k, num_experts, local_experts, hidden, inner,
        hidden_states.dtype == torch.float32, *(_NO_LORA_SIZES if lora is None else lora.op_sizes), cuda,
        _PATHS[stream_mode], workspace_limit_bytes,
    )  # fmt: skip
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=hidden_states.device)
    streams = _NO_STREAMS
    if cuda and (lora is not None or lora_ready_event is not None or down_gemm_done_event is not None):
        streams = (
            *_side_handles(hidden_states.device, stream_mode, lora, tokens),
            _event_handle(lora_ready_event),
            _event_handle(down_gemm_done_event),
        )
    layer_op = torch.ops.moelora.fused_moe_lora.out
    if do_finalize:
        if out is None:
            out = hidden_states.new_empty((tokens, hidden))
        call(layer_op, *arguments, *streams, out=out, workspace=workspace)
        return out
    down_output = hidden_states.new_empty((max_padded_rows(tokens * top_k, local_experts), hidden))
    rows = topk_ids.new_empty((tokens * top_k,), dtype=torch.int32)
    lora_input = hidden_states.new_empty((tokens, top_k, inner)) if has_lora_input else None
    call(
        layer_op, *arguments, *streams, down_output=down_output, expanded_to_permuted=rows,
        activation_lora_input=lora_input, workspace=workspace,
    )  # fmt: skip
    return down_output, topk_weights, rows, lora_input


def fused_moe_lora_single_stream(*args: Any, **kwargs: Any) -> Tensor | Unfinished:
    """`fused_moe_lora` with the decomposed pipeline on the current stream alone."""
    return fused_moe_lora(*args, **kwargs, stream_mode="single")


def fused_moe_lora_two_stream(*args: Any, **kwargs: Any) -> Tensor | Unfinished:
    """`fused_moe_lora` with the adapter's work on a side stream, beside sort, permute and the base GEMMs.

    The same kernels and bits as `fused_moe_lora_single_stream`. Nothing is allocated on the side stream, which has
    rejoined the current stream before the call returns; one is kept per device and caller stream.
    """
    return fused_moe_lora(*args, **kwargs, stream_mode="two")


def _side_handles(
    device: torch.device, stream_mode: str, lora: MoELoRA | None, tokens: int
) -> tuple[int, int, int]:
    two = stream_mode == "two" or (stream_mode == "auto" and tokens <= _streams.two_stream_max_tokens())
    if lora is None or not two:
        return 0, 0, 0
    side = _streams.side_stream(device)
    return side.stream, side.fork_event, side.join_event


@cache
def _workspace_bytes(*sizes: int | None) -> int:
    return torch.ops.moelora.fused_moe_lora_workspace_bytes(*sizes)


def _check_event(name: str, event: torch.cuda.Event | None) -> None:
    if event is None:
        return
    if torch.compiler.is_compiling():
        # The functional op has no place for it, and must not leave it out.
        raise ValueError(f"{name}: a compiled graph cannot hold an event; call this outside torch.compile")
    if not isinstance(event, torch.cuda.Event):
        raise TypeError(f"{name}: expected a torch.cuda.Event, got {type(event).__name__}")


def _event_handle(event: torch.cuda.Event | None) -> int:
    """The raw event; one that was never recorded has none yet, so it is recorded once to make it."""
    if event is None:
        return 0
    if event.cuda_event == 0:
        event.record()
    return event.cuda_event
