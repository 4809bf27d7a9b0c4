"""Streams, events, devices and memory: the caller's stream is honoured, and nothing outlives the call."""

import pytest
import torch
from gpu.graph_helpers import StaticLayer, capture

import moelora
from moelora import _streams
from moelora.reference import gate_up_lora_delta_reference, moe_lora_reference
from moelora.testing.errors import bad_rows

SLEEP_CYCLES = 2_000_000  # about 1 ms
MODES = ("single", "two", "auto")


def side_of_current() -> torch.cuda.Stream:
    return _streams.side_stream(torch.device("cuda", torch.cuda.current_device())).owners[0]


@pytest.mark.parametrize("mode", MODES)
def test_thousand_replays_under_load_with_each_side_delayed_in_turn(device, mode):
    """G01, G04: one stream is late, then the other, while a third keeps the card busy."""
    static = StaticLayer(8)
    expected = static.run(mode)
    graph, out = capture(lambda: static.run(mode))
    busy = torch.cuda.Stream()
    load = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for step in range(1000):
        with torch.cuda.stream(busy):
            load @ load
        if step % 10 == 1:
            with torch.cuda.stream(side_of_current()):
                torch.cuda._sleep(SLEEP_CYCLES // 10)
        if step % 10 == 6:
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        out.fill_(torch.nan)
        if step % 2:
            graph.replay()
            got = out
        else:
            got = static.run(mode)
        assert torch.equal(got, expected), step


@pytest.mark.parametrize("mode", MODES)
def test_inputs_may_be_overwritten_right_after_the_call(device, mode):
    """G02, G03: the side stream has rejoined, so the caller's next op on the current stream comes after all reads."""
    static = StaticLayer(8)
    x = static.layer.hidden_states
    original = x.clone()
    expected = static.run(mode)
    for step in range(200):
        with torch.cuda.stream(side_of_current()):
            torch.cuda._sleep(SLEEP_CYCLES // 20)
        out = static.run(mode)
        x.fill_(torch.nan)
        assert torch.equal(out, expected), step
        x.copy_(original)


@pytest.mark.parametrize("mode", MODES)
def test_memory_freed_after_the_call_is_not_read_by_the_side_stream(device, mode):
    """G03: on a stream of the caller's, inputs are deleted and their memory is filled with NaN at once."""
    static = StaticLayer(64)
    expected = static.run(mode)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(300):
            inputs = static.layer.with_(hidden_states=static.layer.hidden_states.clone())
            with torch.cuda.stream(side_of_current()):
                torch.cuda._sleep(SLEEP_CYCLES // 20)
            with torch.no_grad():
                out = moelora.fused_moe_lora(
                    *inputs.arguments, lora=static.lora, adapter_ids=static.adapter_ids, stream_mode=mode
                )
            size = inputs.hidden_states.shape
            del inputs
            torch.full(size, torch.nan, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(out, expected), step


@pytest.mark.parametrize("mode", MODES)
def test_current_stream_is_honoured(device, mode):
    """G09: the inputs are made late on the caller's stream, without a synchronisation."""
    static = StaticLayer(8)
    expected = static.run(mode)
    x = static.layer.hidden_states
    original = x.clone()
    stream = torch.cuda.Stream()
    for step in range(20):
        x.fill_(torch.nan)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(original)
            out = static.run(mode)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, expected), step


def test_each_caller_stream_has_a_side_stream_of_its_own(device):
    """torch hands out the same 32 streams again and again: none is its own side stream, and 31 are nobody else's"""
    sides = {}
    for _ in range(100):
        caller = torch.cuda.Stream()
        with torch.cuda.stream(caller):
            side = side_of_current().cuda_stream
        assert sides.setdefault(caller.cuda_stream, side) == side != caller.cuda_stream
    assert len(sides) == 32 and len(set(sides.values())) >= 31


def test_lora_ready_event_is_waited_for(device):
    """A caller overlaps its own adapter work: the delta is finished late on another stream."""
    static = StaticLayer(16)
    inputs = static.layer
    delta = gate_up_lora_delta_reference(
        inputs.hidden_states, inputs.topk_ids, lora=static.lora, adapter_ids=static.adapter_ids
    ).to(torch.bfloat16)
    arrives = torch.full_like(delta, torch.nan)
    other, event = torch.cuda.Stream(), torch.cuda.Event()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(10 * SLEEP_CYCLES)
        arrives.copy_(delta)
        event.record()
    with torch.no_grad():
        out = moelora.fused_moe_lora(*inputs.arguments, gate_up_lora_delta=arrives, lora_ready_event=event)
    expected = moe_lora_reference(*inputs.arguments, gate_up_lora_delta=delta)
    assert not len(bad_rows(out, expected))


def test_down_gemm_done_event_is_recorded_before_finalize(device):
    """A fresh event is accepted, and whoever waits for it sees the down rows."""
    static = StaticLayer(16)
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    with torch.no_grad():
        down, _, rows, lora_input = moelora.fused_moe_lora(
            *static.layer.arguments, down_gemm_done_event=event, do_finalize=False
        )
    other.wait_event(event)
    with torch.cuda.stream(other):
        copied = down[rows.long()].clone()
    torch.cuda.current_stream().wait_stream(other)
    assert lora_input is None
    weighted = copied.view(16, -1, down.shape[1]).float() * static.layer.topk_weights[..., None]
    assert not len(bad_rows(weighted.sum(1).to(torch.bfloat16), moe_lora_reference(*static.layer.arguments)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", MODES)
def test_tensors_on_another_device_than_the_current_one(device, mode):
    """G10: everything on cuda:1 while cuda:0 is current; mixed devices are refused by name."""
    here, there = StaticLayer(8), StaticLayer(8, device="cuda:1")
    with torch.cuda.device(0):
        assert torch.equal(there.run(mode).cpu(), here.run(mode).cpu())
        mixed = here.layer.with_(w2=there.layer.w2)
        with pytest.raises(ValueError, match="w2: expected the device"):
            moelora.fused_moe_lora(*mixed.arguments)


@pytest.mark.parametrize("mode", MODES)
def test_eager_calls_do_not_grow_memory(device, mode):
    static = StaticLayer(64)
    static.run(mode)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        static.run(mode)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
