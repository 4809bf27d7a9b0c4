"""Tests of `workspace_limit_bytes`, for any device: many tokens run in chunks of one bounded workspace.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

import re

import pytest
import torch
from layer_cases import make, oracle, run, stream_modes

import moelora
from moelora import ops
from moelora.reference import down_lora_delta_reference, gate_up_lora_delta_reference
from moelora.testing import Shape, check_close

# Three chunks of at most 2048 tokens, the last one shorter.
TOKENS = 4999
SHAPE = Shape(hidden=64, inter=32, experts=8, top_k=2)
PATHS = {"auto": 0, "single": 1, "two": 1}


def workspace_bytes(device, dtype, mode, limit, tokens=TOKENS, shape=SHAPE, sizes=(3, 8, 2, False, 8)):
    """Of a call with the adapters of `make`."""
    return torch.ops.moelora.fused_moe_lora_workspace_bytes(
        tokens, shape.top_k, shape.experts, shape.experts, shape.hidden, shape.inter, dtype == torch.float32, *sizes,
        torch.device(device).type == "cuda", PATHS[mode], limit,
    )  # fmt: skip


def least(device, dtype, mode, **options):
    """The smallest limit that works, from the error's text."""
    with pytest.raises(RuntimeError, match="workspace_limit_bytes: expected at least") as caught:
        workspace_bytes(device, dtype, mode, 1, **options)
    return int(re.search(r"at least (\d+)", str(caught.value))[1])


def forms(layer, lora, adapter_ids):
    """The same call with its per-token inputs in every form that a chunk has to find its part of."""
    strided_ids = adapter_ids.long()[:, None].expand(-1, 3).contiguous()[:, 1]
    columns = layer.with_(
        topk_ids=layer.topk_ids.long().T.contiguous().T, topk_weights=layer.topk_weights.bfloat16().T.contiguous().T
    )
    packed = layer.with_(topk_weights=None, topk_ids=ops.pack_topk(layer.topk_weights, layer.topk_ids))
    rows = torch.zeros(TOKENS, SHAPE.hidden + 8, dtype=layer.hidden_states.dtype, device=layer.hidden_states.device)
    rows[:, : SHAPE.hidden] = layer.hidden_states
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora, adapter_ids)
    own_delta = {"gate_up_lora_delta": delta.to(layer.hidden_states.dtype)}
    z = torch.randn(*layer.topk_ids.shape, SHAPE.inter, generator=torch.Generator().manual_seed(3)).to(delta.device)
    down = down_lora_delta_reference(z, layer.topk_ids, lora, adapter_ids)
    own_delta["down_lora_delta"] = down.to(layer.hidden_states.dtype)
    return {
        "plain": (layer, None, None, {}),
        "adapters": (layer, lora, adapter_ids, layer.biases),
        "int64, bf16 and strided": (columns, lora, strided_ids, {}),
        "packed": (packed, lora, adapter_ids, {}),
        "rows apart": (layer.with_(hidden_states=rows[:, : SHAPE.hidden]), lora, adapter_ids, {}),
        "deltas": (layer, None, None, own_delta),
    }


@pytest.mark.parametrize("form", ["plain", "adapters", "int64, bf16 and strided", "packed", "rows apart", "deltas"])
def test_chunks_agree_with_the_oracle(device, dtype, form):
    """Under the least limit that works every token gets its own ids, weights, adapter and deltas"""
    layer, lora, adapter_ids, options = forms(*make(TOKENS, device, dtype, SHAPE))[form]
    if layer.topk_weights is None:
        weights, ids = ops.unpack_topk(layer.topk_ids)
        expected = oracle(layer.with_(topk_weights=weights, topk_ids=ids), lora, adapter_ids, **options)
    else:
        expected = oracle(layer, lora, adapter_ids, **options)
    sizes = (3, 8, 2, False, 8) if lora is not None else (0, 0, 1, False, 0)
    for mode in stream_modes(device):
        limit = least(device, dtype, mode, sizes=sizes)
        got = run(layer, lora, adapter_ids, **options, stream_mode=mode, workspace_limit_bytes=limit)
        check_close(got, expected)


def test_chunks_with_the_weight_on_the_input(device, dtype):
    shape = Shape(hidden=64, inter=32, experts=8, top_k=1)
    layer, lora, adapter_ids = make(TOKENS, device, dtype, shape)
    expected = oracle(layer, lora, adapter_ids, apply_router_weight_on_input=True)
    for mode in stream_modes(device):
        limit = least(device, dtype, mode, shape=shape)
        got = run(
            layer, lora, adapter_ids, apply_router_weight_on_input=True, stream_mode=mode, workspace_limit_bytes=limit
        )
        check_close(got, expected)


def test_chunks_fill_an_out_with_rows_apart(device, dtype):
    layer, lora, adapter_ids = make(TOKENS, device, dtype, SHAPE)
    buffer = torch.full((TOKENS, SHAPE.hidden + 8), 7.0, dtype=dtype, device=device)
    limit = least(device, dtype, "auto")
    run(layer, lora, adapter_ids, workspace_limit_bytes=limit, out=buffer[:, : SHAPE.hidden])
    assert torch.equal(
        buffer[:, : SHAPE.hidden].contiguous(), run(layer, lora, adapter_ids, workspace_limit_bytes=limit)
    )
    assert (buffer[:, SHAPE.hidden :] == 7).all()


@pytest.mark.parametrize("mode", PATHS)
def test_the_workspace_stays_under_the_limit(device, dtype, mode):
    """Between the least that works and the whole, and no byte around it is written"""
    whole, smallest = workspace_bytes(device, dtype, mode, None), least(device, dtype, mode)
    assert smallest < whole / 2
    layer, lora, adapter_ids = make(TOKENS, device, dtype, SHAPE)
    for limit in (smallest, (smallest + whole) // 2, whole, 2 * whole):
        needed = workspace_bytes(device, dtype, mode, limit)
        assert needed <= limit
        memory = torch.full((needed + 512,), 0x7F, dtype=torch.uint8, device=device)
        out = torch.empty(TOKENS, SHAPE.hidden, dtype=dtype, device=device)
        with torch.inference_mode():
            torch.ops.moelora.fused_moe_lora.out(
                *layer.arguments, gate_up_a=lora.gate_up_a, gate_up_b=lora.gate_up_b, down_a=lora.down_a,
                down_b=lora.down_b, scaling=lora.scaling, adapter_ids=adapter_ids, num_experts=SHAPE.experts,
                path=PATHS[mode], workspace_limit_bytes=limit, out=out, workspace=memory[256:-256],
            )  # fmt: skip
        assert (memory[:256] == 0x7F).all() and (memory[-256:] == 0x7F).all()
        check_close(out, oracle(layer, lora, adapter_ids))


def test_a_limit_that_is_not_reached_changes_no_bit(device, dtype):
    layer, lora, adapter_ids = make(TOKENS, device, dtype, SHAPE)
    whole = workspace_bytes(device, dtype, "auto", None)
    assert torch.equal(run(layer, lora, adapter_ids, workspace_limit_bytes=whole), run(layer, lora, adapter_ids))


@pytest.mark.parametrize("tokens", [0, 1, 2048, TOKENS])
def test_a_limit_that_is_too_small_says_the_least_that_works(device, dtype, tokens):
    layer, lora, adapter_ids = make(tokens, device, dtype, SHAPE)
    smallest = least(device, dtype, "auto", tokens=tokens)
    out = torch.full((tokens, SHAPE.hidden), 7.0, dtype=dtype, device=device)
    for limit in (-1, 0, smallest - 1):
        with pytest.raises(ValueError, match=f"^workspace_limit_bytes: expected at least {smallest} .*got {limit}$"):
            run(layer, lora, adapter_ids, workspace_limit_bytes=limit, out=out)
    assert (out == 7).all()
    check_close(run(layer, lora, adapter_ids, workspace_limit_bytes=smallest), oracle(layer, lora, adapter_ids))


def test_a_limit_has_no_use_without_finalize(device, dtype):
    layer, lora, adapter_ids = make(9, device, dtype, SHAPE)
    limited = {"workspace_limit_bytes": 2**40, "do_finalize": False}
    with pytest.raises(ValueError, match=r"^workspace_limit_bytes: has no use with do_finalize=False"):
        run(layer, lora, adapter_ids, **limited)
    with pytest.raises(RuntimeError, match="workspace_limit_bytes: has no use"), torch.inference_mode():
        torch.ops.moelora.fused_moe_lora(*layer.arguments, num_experts=SHAPE.experts, **limited)


def test_a_compiled_forward_keeps_the_limit(device, dtype):
    torch._dynamo.reset()
    layer, lora, adapter_ids = make(TOKENS, device, dtype, SHAPE)

    def forward(hidden_states, limit):
        return moelora.fused_moe_lora(
            hidden_states, *layer.arguments[1:], lora=lora, adapter_ids=adapter_ids, workspace_limit_bytes=limit
        )

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    limit = least(device, dtype, "auto")
    with torch.no_grad():
        assert torch.equal(compiled(layer.hidden_states, limit), forward(layer.hidden_states, limit))
        with pytest.raises(RuntimeError, match="workspace_limit_bytes: expected at least"):
            compiled(layer.hidden_states, 1)
