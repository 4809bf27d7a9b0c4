"""Shows that the comparison of the tests catches each kind of mix-up: the real forward, given inputs mixed up.

`check_close` would accept rows that `bad_rows` does not list; so every row that a mix-up touches must be listed, for
the loosest bound in use.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from layer_cases import make, oracle, run

import moelora
from moelora import ops
from moelora.reference import down_lora_delta_reference
from moelora.testing import Shape, bad_rows, check_close

TOKENS, SHAPE = 24, Shape(hidden=64, inter=32, experts=8, top_k=3)


@dataclass
class Call:
    """A call of the forward, and by token whether a mix-up of base weights or of adapters would touch it."""

    layer: Any
    lora: Any
    adapter_ids: torch.Tensor
    options: dict

    def result(self):
        return run(self.layer, self.lora, self.adapter_ids, **self.options)

    def expected(self, **options):
        return oracle(self.layer, self.lora, self.adapter_ids, **(self.options | options))

    def changed(self, *, lora=None, adapter_ids=None, options=None, **layer):
        return replace(
            self,
            layer=self.layer.with_(**layer),
            lora=self.lora if lora is None else lora,
            adapter_ids=self.adapter_ids if adapter_ids is None else adapter_ids,
            options=self.options | (options or {}),
        )

    def with_stacks(self, **stacks):
        names = ("gate_up_a", "gate_up_b", "down_a", "down_b", "scaling", "ranks")
        given = {name: getattr(self.lora, name) for name in names} | stacks
        return self.changed(lora=moelora.MoELoRA(**given))


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture
def call(device, dtype):
    """Separate A for gate and up, ranks below the allocated one, scales that all differ, biases."""
    ranks = [(16, 16), (8, 12), (12, 8)]
    layer, lora, adapter_ids = make(TOKENS, device, dtype, SHAPE, rank=16, ranks=ranks)
    for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b):
        stack.nan_to_num_(0.0)
    # Weights that are not 1 and differ by k, so that leaving them out, applying them twice or exchanging them shows.
    by_choice = torch.tensor([1.0, 0.5, 1.5], device=device)
    layer = layer.with_(topk_weights=(0.3 + 0.3 * layer.topk_weights) * by_choice)
    return Call(layer, lora, adapter_ids, dict(layer.biases))


def swap_halves(stack, dim):
    return stack.unflatten(dim, (2, -1)).flip(dim).flatten(dim, dim + 1)


BASE, ADAPTER = "every row", "rows with an adapter"


def bias_options(name, change):
    return lambda c: c.changed(options={name: change(getattr(c.layer, name))})


def stack_change(name, change):
    return lambda c: c.with_stacks(**{name: change(getattr(c.lora, name))})


def other_ids(change):
    return lambda c: c.changed(adapter_ids=change(c.adapter_ids))


# What a wrong kernel might do, as inputs that make a right one do it: (rows it touches, the mixed-up call).
MIX_UPS = {
    "gate and up rows of w13 swapped": (BASE, lambda c: c.changed(options={"gate_up_layout": "up_gate"})),
    "w13 read as interleaved": (BASE, lambda c: c.changed(options={"gate_up_layout": "interleaved"})),
    "gate and up bias swapped": (BASE, bias_options("w13_bias", lambda b: swap_halves(b, 1))),
    "expert off by one in w13": (BASE, lambda c: c.changed(w13=c.layer.w13.roll(-1, 0))),
    "expert off by one in w2": (BASE, lambda c: c.changed(w2=c.layer.w2.roll(-1, 0))),
    "expert off by one in w13_bias": (
        BASE,
        bias_options("w13_bias", lambda b: b.roll(-1, 0)),
    ),
    "expert off by one in w2_bias": (BASE, bias_options("w2_bias", lambda b: b.roll(-1, 0))),
    "bias left out": (BASE, lambda c: c.changed(options={"w2_bias": None})),
    "row of another token": (BASE, lambda c: c.changed(hidden_states=c.layer.hidden_states.roll(1, 0))),
    "weights of another token": (BASE, lambda c: c.changed(topk_weights=c.layer.topk_weights.roll(1, 0))),
    "weights in another order of k": (BASE, lambda c: c.changed(topk_weights=c.layer.topk_weights.roll(1, 1))),
    "weight applied twice": (BASE, lambda c: c.changed(topk_weights=c.layer.topk_weights.square())),
    "weight left out": (BASE, lambda c: c.changed(topk_weights=torch.ones_like(c.layer.topk_weights))),
    "scaling factor left out or applied twice": (
        BASE,
        lambda c: c.changed(options={"routed_scaling_factor": 1.5}),
    ),
    "one of the K experts left out": (
        BASE,
        lambda c: c.changed(topk_ids=torch.cat([c.layer.topk_ids[:, :2], c.layer.topk_ids[:, 2:] - 100], 1)),
    ),
    "another activation": (BASE, lambda c: c.changed(options={"activation": "swigluoai"})),
    "another adapter": (ADAPTER, other_ids(lambda ids: torch.where(ids < 0, -1, (ids + 1) % 3))),
    "slot 0 for everybody": ("rows of slots 1 and 2", other_ids(lambda ids: ids.clamp(max=0))),
    "adapter of another token": ("rows whose neighbour differs", other_ids(lambda ids: ids.roll(1))),
    "an adapter where there is none": ("rows without adapter", other_ids(lambda ids: ids.clamp(min=0))),
    "no adapter at all": (ADAPTER, other_ids(lambda ids: torch.full_like(ids, -1))),
    "expert off by one in gate_up A": (ADAPTER, stack_change("gate_up_a", lambda a: a.roll(-1, 1))),
    "expert off by one in gate_up B": (ADAPTER, stack_change("gate_up_b", lambda b: b.roll(-1, 1))),
    "expert off by one in down A": (ADAPTER, stack_change("down_a", lambda a: a.roll(-1, 1))),
    "expert off by one in down B": (ADAPTER, stack_change("down_b", lambda b: b.roll(-1, 1))),
    "gate's A and up's A swapped (D01)": (ADAPTER, stack_change("gate_up_a", lambda a: swap_halves(a, 2))),
    "gate's B and up's B swapped": (ADAPTER, stack_change("gate_up_b", lambda b: swap_halves(b, 2))),
    "gate's A for up too (D01)": (
        ADAPTER,
        stack_change("gate_up_a", lambda a: a[:, :, :16].contiguous()),
    ),
    "up's A read at row r instead of R1 (E04)": (
        "rows of slots 1 and 2",
        lambda c: c.with_stacks(gate_up_a=up_at_r(c.lora)),
    ),
    "rank cut short": (ADAPTER, stack_change("ranks", lambda ranks: ranks - 3)),
    "B read column by column": (ADAPTER, stack_change("down_b", lambda b: transposed_bytes(b))),
    "scales of another slot": (ADAPTER, stack_change("scaling", lambda s: s.roll(1, 0))),
    "scales applied twice": (ADAPTER, stack_change("scaling", torch.square)),
    "scales left out": (ADAPTER, stack_change("scaling", torch.ones_like)),
    "gate's scale for up, up's for gate": (ADAPTER, stack_change("scaling", lambda s: s[:, [1, 0, 2]].contiguous())),
    "gate_up part left out": (ADAPTER, lambda c: c.with_stacks(gate_up_a=None, gate_up_b=None)),
    "down part left out": (ADAPTER, lambda c: c.with_stacks(down_a=None, down_b=None)),
}  # fmt: skip


def up_at_r(lora):
    """gate_up A as a kernel sees it that looks for up's rows right after the r rows of gate."""
    a = lora.gate_up_a.clone()
    for slot, (rank, _) in enumerate(lora.ranks.tolist()):
        a[slot, :, 16:32] = lora.gate_up_a[slot, :, rank : rank + 16]
    return a


def transposed_bytes(stack):
    """The same memory read with rows and columns exchanged."""
    return stack.contiguous().view(*stack.shape[:2], stack.shape[3], stack.shape[2]).transpose(2, 3).contiguous()


def touched_rows(call, which):
    ids = call.adapter_ids
    return {
        BASE: torch.ones_like(ids, dtype=torch.bool),
        ADAPTER: ids >= 0,
        "rows of slots 1 and 2": ids >= 1,
        "rows whose neighbour differs": ids != ids.roll(1),
        "rows without adapter": ids < 0,
    }[which]


def assert_caught(got, call, rows):
    """Every touched row is refused, even where plain PyTorch would excuse it; and so is the whole."""
    expected, plain = call.expected(), call.expected(dtype=None)
    caught = torch.zeros_like(rows).index_fill_(0, bad_rows(got, expected, plain=plain).flatten(), True)
    assert rows.any()
    assert (caught | ~rows).all()
    with pytest.raises(AssertionError):
        check_close(got, expected, plain=plain)


@pytest.mark.parametrize("name", MIX_UPS)
def test_a_mix_up_is_caught(call, name):
    which, mix_up = MIX_UPS[name]
    check_close(call.result(), call.expected(), plain=call.expected(dtype=None))
    assert_caught(mix_up(call).result(), call, touched_rows(call, which))


def test_an_expert_range_off_by_one_is_caught(call):
    """expert parallelism: this process holds experts 2..5, and the kernel takes 1..4 or 3..6 for them"""
    held = slice(2, 6)
    mine = call.changed(
        lora=call.lora.shard(experts=held), w13=call.layer.w13[held], w2=call.layer.w2[held],
        options={"w13_bias": call.layer.w13_bias[held], "w2_bias": call.layer.w2_bias[held],
                 "num_experts": 8, "expert_offset": 2},
    )  # fmt: skip
    check_close(mine.result(), mine.expected(), plain=mine.expected(dtype=None))
    ids = call.layer.topk_ids
    for offset in (1, 3):
        touched = ((ids >= min(2, offset)) & (ids < 6 + max(0, offset - 2))).any(dim=1)
        assert_caught(mine.changed(options={"expert_offset": offset}).result(), mine, touched)


def test_other_processes_pairs_computed_here_are_caught(call):
    """expert parallelism: ids outside the range wrapped into it"""
    held = slice(0, 4)
    mine = call.changed(
        lora=call.lora.shard(experts=held), w13=call.layer.w13[held], w2=call.layer.w2[held],
        options={"w13_bias": call.layer.w13_bias[held], "w2_bias": call.layer.w2_bias[held], "num_experts": 8},
    )  # fmt: skip
    wrapped = mine.changed(topk_ids=mine.layer.topk_ids % 4)
    assert_caught(wrapped.result(), mine, (mine.layer.topk_ids >= 4).any(dim=1))


def test_a_delta_that_is_wrongly_weighted_is_caught(call):
    """down_lora_delta_is_weighted taken for its opposite"""
    tokens = torch.arange(TOKENS, device=call.layer.topk_ids.device)
    delta = torch.randn(TOKENS, SHAPE.top_k, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    delta = delta.to(call.layer.hidden_states)
    plain = call.changed(adapter_ids=call.adapter_ids, options={"down_lora_delta": delta})
    plain = replace(plain, lora=None, adapter_ids=None)
    weighted = plain.changed(options={"down_lora_delta_is_weighted": True})
    assert_caught(weighted.result(), plain, tokens >= 0)
    assert_caught(plain.result(), weighted, tokens >= 0)


def test_a_delta_with_halves_or_pairs_swapped_is_caught(call):
    """[up | gate] for [gate | up], by permuted row for by pair, transposed"""
    delta = torch.randn(TOKENS, SHAPE.top_k, 2 * SHAPE.inter, generator=torch.Generator().manual_seed(2))
    delta = delta.to(call.layer.hidden_states)
    plain = replace(call.changed(options={"gate_up_lora_delta": delta}), lora=None, adapter_ids=None)
    check_close(plain.result(), plain.expected(), plain=plain.expected(dtype=None))
    order = ops.moe_sort(call.layer.topk_ids, num_local_experts=8).permuted_to_expanded
    by_row = delta.flatten(0, 1)[order[order >= 0].long()].view_as(delta)
    every_row = torch.ones(TOKENS, dtype=torch.bool, device=delta.device)
    for wrong in (moelora.swap_gate_up(delta), delta.roll(1, 1), delta.roll(1, 0),
                  delta.transpose(1, 2).contiguous().view_as(delta)):  # fmt: skip
        assert_caught(plain.changed(options={"gate_up_lora_delta": wrong}).result(), plain, every_row)
    moved = (by_row != delta).any(dim=2).any(dim=1)
    assert_caught(plain.changed(options={"gate_up_lora_delta": by_row}).result(), plain, moved)


def test_a_weight_on_the_input_taken_for_one_on_the_output_is_caught(device, dtype):
    layer, lora, adapter_ids = make(TOKENS, device, dtype, Shape(64, 32, 8, 1))
    layer = layer.with_(topk_weights=0.3 + 0.3 * layer.topk_weights)
    on_input = Call(layer, lora, adapter_ids, layer.biases | {"apply_router_weight_on_input": True})
    every_row = torch.ones(TOKENS, dtype=torch.bool, device=device)
    on_output = on_input.changed(options={"apply_router_weight_on_input": False})
    assert_caught(on_output.result(), on_input, every_row)
    assert_caught(on_input.result(), on_output, every_row)
    twice = on_input.changed(topk_weights=layer.topk_weights.square())
    assert_caught(twice.result(), on_input, every_row)


def test_a_down_adapter_fed_with_the_wrong_rows_is_caught(call):
    """z by pair of the neighbouring k: what a caller of do_finalize=False would do with a wrong index map"""
    lora_input = run(call.layer, call.lora, call.adapter_ids, **call.options, do_finalize=False)[3]
    right = down_lora_delta_reference(lora_input, call.layer.topk_ids, call.lora, call.adapter_ids)
    wrong = down_lora_delta_reference(lora_input.roll(1, 1), call.layer.topk_ids, call.lora, call.adapter_ids)
    gate_up_only = call.with_stacks(down_a=None, down_b=None)
    dtype = call.layer.hidden_states.dtype
    good = gate_up_only.changed(options={"down_lora_delta": right.to(dtype)}).result()
    check_close(good, call.expected(), plain=call.expected(dtype=None))
    bad = gate_up_only.changed(options={"down_lora_delta": wrong.to(dtype)}).result()
    assert_caught(bad, call, call.adapter_ids >= 0)


@pytest.mark.parametrize("row", [0, TOKENS - 1])
def test_one_wrong_element_of_the_whole_result_is_caught(call, row):
    """an unwritten element (NaN or 0), a row of zeros, and one that belongs to another token"""
    right = call.result()
    for damage in ("NaN", "zero row", "other row"):
        got = right.clone()
        if damage == "NaN":
            got[row, 5] = torch.nan
        elif damage == "zero row":
            got[row] = 0
        else:
            got[row] = right[row - 1]
        expected = call.expected()
        assert bad_rows(got, expected).flatten().tolist() == [row]
