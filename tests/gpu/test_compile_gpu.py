"""Schemas, fake kernels, torch.compile and torch.export on the GPU: the tests of the CPU, and events."""

import torch
from compile_cases import *  # noqa: F403
from compile_cases import FORWARD, forward_arguments

import moelora


def test_a_call_with_an_event_is_left_out_of_graphs(device):
    """Without fullgraph: the event is waited for, as in eager"""
    torch._dynamo.reset()
    arguments = forward_arguments(16, device) | {"lora": None, "adapter_ids": None}
    delta = torch.randn(16, FORWARD.top_k, 2 * FORWARD.inter, device=device, dtype=torch.bfloat16)
    event, other = torch.cuda.Event(), torch.cuda.Stream()

    @torch.compile(backend="aot_eager")
    def step(given):
        return moelora.fused_moe_lora(**arguments, gate_up_lora_delta=given, lora_ready_event=event) * 2

    expected = moelora.fused_moe_lora(**arguments, gate_up_lora_delta=delta) * 2
    # The first call compiles what there is to compile; the second is timed against the event.
    for _ in range(2):
        arrives = torch.full_like(delta, torch.nan)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
            arrives.copy_(delta)
            event.record()
        got = step(arrives)
        torch.cuda.synchronize()
    assert torch.equal(got, expected)
