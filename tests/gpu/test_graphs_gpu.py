"""CUDA graphs: everything that may change between replays changes, and the bits stay those of the eager call."""

import gc
import itertools
import subprocess
import sys

import pytest
import torch
from gpu.graph_helpers import StaticLayer, capture

import moelora
from moelora.reference import moe_lora_reference
from moelora.testing.errors import bad_rows

MODES = ("single", "two", "auto")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 4, 8, 64, 300])
def test_replay_has_the_bits_of_the_eager_call_for_any_contents(device, mode, tokens):
    """G01, G06, K14: hidden states, ids, weights, adapter ids and adapters all change between replays."""
    static = StaticLayer(tokens)
    graph, out = capture(lambda: static.run(mode))
    for seed in range(1, 9):
        static.refill(seed, base_only=seed % 3 == 0)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, static.run(mode)), seed


@pytest.mark.parametrize("tokens", [1, 4, 8, 64, 300])
def test_two_streams_have_the_bits_of_one(device, tokens):
    static = StaticLayer(tokens)
    for seed in range(1, 20):
        static.refill(seed)
        assert torch.equal(static.run("single"), static.run("two")), seed


@pytest.mark.parametrize("mode", ["single", "two"])
def test_batch_of_base_rows_has_the_bits_of_a_call_without_lora(device, mode):
    """E07, E08: a graph captured with adapters serves a batch in which no row has one."""
    static = StaticLayer(32)
    graph, out = capture(lambda: static.run(mode))
    static.refill(3, base_only=True)
    graph.replay()
    assert torch.equal(out, static.run(mode, with_lora=False))


@pytest.mark.parametrize("mode", MODES)
def test_row_without_adapter_does_not_depend_on_the_other_rows_adapters(device, mode):
    """Spec section 2, Bits: it has the bits it has when every adapter id is -1."""
    static = StaticLayer(96)
    mixed = static.run(mode)
    base_rows = static.adapter_ids < 0
    assert base_rows.any() and not base_rows.all()
    static.adapter_ids.fill_(-1)
    assert torch.equal(mixed[base_rows], static.run(mode)[base_rows])


def test_graphs_of_many_sizes_share_a_pool_in_any_order(device):
    """G08: captured large to small and small to large, replayed in any order beside eager calls, some destroyed."""
    pool = torch.cuda.graph_pool_handle()
    sizes = [64, 1, 300, 8, 17, 2]
    graphs = {}
    for tokens, mode in itertools.product(sizes, ("single", "two")):
        static = StaticLayer(tokens)
        graphs[tokens, mode] = (static, *capture(lambda static=static, mode=mode: static.run(mode), pool))
    keys = list(graphs)
    for round_ in range(4):
        order = keys[round_::2] + keys[::-1]
        for step, key in enumerate(order):
            if key not in graphs:
                continue
            static, graph, out = graphs[key]
            static.refill(100 * round_ + step)
            graph.replay()
            got = out.clone()
            StaticLayer(1000).run("single")
            assert torch.equal(got, static.run(key[1])), key
        for key in keys[round_ :: len(sizes)]:
            graphs.pop(key, None)
        gc.collect()


_FIRST_CALL_IN_CAPTURE = """
import gc, torch
from gpu.graph_helpers import StaticLayer, capture
static = StaticLayer(8)
torch.cuda.synchronize()
graph, out = capture(lambda: static.run("{mode}"))
gc.collect()
static.refill(5)
graph.replay()
assert torch.equal(out, static.run("{mode}"))
"""


@pytest.mark.parametrize("mode", MODES)
def test_the_first_call_ever_may_be_in_a_capture(device, mode):
    """G05, G11: no stream, event, attribute or table is made in a way that capture forbids."""
    code = _FIRST_CALL_IN_CAPTURE.format(mode=mode)
    done = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mode", MODES)
def test_thousand_replays_that_feed_on_each_other_do_not_drift(device, mode):
    """G13: each output feeds the next input; every one equals the eager call."""
    static = StaticLayer(16)
    graph, out = capture(lambda: static.run(mode))
    for _ in range(1000):
        graph.replay()
        eager = static.run(mode)
        assert torch.equal(out, eager)
        static.layer.hidden_states.copy_(torch.nn.functional.normalize(out.float(), dim=-1) * 16)


@pytest.mark.parametrize("mode", MODES)
def test_four_layers_in_one_graph_with_allocations_between(device, mode):
    """G01: scratch of one layer is never reused by the allocator while the side stream still reads it."""
    layers = [StaticLayer(8, seed=seed) for seed in range(4)]

    def chain(run_layer):
        outs = []
        for static in layers:
            outs.append(run_layer(static))
            torch.full((static.tokens * 4, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
        return torch.stack(outs)

    graph, out = capture(lambda: chain(lambda static: static.run(mode)))
    for seed in range(100):
        for offset, static in enumerate(layers):
            static.refill(10 * seed + offset)
        graph.replay()
        expected = chain(lambda static: static.run("single" if mode == "two" else mode))
        assert torch.equal(out, expected), seed


@pytest.mark.parametrize("mode", MODES)
def test_captured_forward_is_right_and_not_only_repeatable(device, mode):
    static = StaticLayer(33)
    graph, out = capture(lambda: static.run(mode))
    static.refill(7)
    graph.replay()
    expected = moe_lora_reference(*static.layer.arguments, lora=static.lora, adapter_ids=static.adapter_ids)
    assert not len(bad_rows(out, expected))


def test_compiled_forward_has_no_graph_break(device):
    """H03, H07: fullgraph, dynamic T, the same values."""
    static = StaticLayer(8)
    compiled = torch.compile(
        lambda x, weights, ids, slots: moelora.fused_moe_lora(
            x, static.layer.w13, static.layer.w2, weights, ids, lora=static.lora, adapter_ids=slots
        ),
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (2, 5, 8):
        part = static.layer.tokens(slice(tokens))
        arguments = (part.hidden_states, part.topk_weights, part.topk_ids, static.adapter_ids[:tokens])
        with torch.no_grad():
            got = compiled(*arguments)
        expected = moe_lora_reference(*part.arguments, lora=static.lora, adapter_ids=static.adapter_ids[:tokens])
        assert not len(bad_rows(got, expected))
