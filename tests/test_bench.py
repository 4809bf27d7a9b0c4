"""What of `moelora.bench` needs no GPU: the grouped_mm composition against the oracle, and the lines it prints."""

import pytest
import torch
from layer_cases import make

from moelora.bench.__main__ import HEADER, line, parse
from moelora.bench.grouped_mm import GroupedAdapters, grouped_mm_layer
from moelora.reference import moe_lora_reference
from moelora.testing import Shape, poisoned_memory, random_lora, row_errors
from moelora.testing.inputs import random_adapter_ids

SHAPE = Shape(hidden=64, inter=32, experts=8, top_k=2)


@pytest.mark.parametrize("num_experts", [8, 24])
@pytest.mark.parametrize("adapters", ["none", "one", "four", "four and base rows"])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_the_grouped_mm_composition_is_right(tokens, adapters, num_experts):
    """Also where most pairs are not local, on memory that starts as NaN"""
    layer, _, _ = make(tokens, "cpu", torch.bfloat16, SHAPE)
    lora = grouped = adapter_ids = None
    if adapters != "none":
        slots, mixed = (1 if adapters == "one" else 4), adapters.endswith("rows")
        lora = random_lora(slots, SHAPE, 8, dtype=torch.bfloat16, shared_a=True)
        lora.scaling.fill_(1.0)
        adapter_ids = random_adapter_ids(tokens, slots)
        if not mixed:
            adapter_ids = adapter_ids.clamp(min=0)
        grouped = GroupedAdapters.of(lora, with_base_rows=mixed)
    scores = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(tokens))
    ids = scores.argsort(dim=1)[:, : SHAPE.top_k].int()
    arguments = (layer.hidden_states, layer.w13, layer.w2, layer.topk_weights, ids)
    with torch.inference_mode(), poisoned_memory():
        got = grouped_mm_layer(*arguments, num_experts, grouped, adapter_ids)
    expected = moe_lora_reference(
        *arguments, lora=lora, adapter_ids=adapter_ids, num_experts=num_experts, dtype=torch.float32
    )
    assert row_errors(got, expected).max() <= 0.06


RESULT = {
    "shape": "S1", "tokens": 16, "adapters": "1 x r16", "us": {"auto": 50.0, "grouped_mm": 100.0},
    "error": {"auto": 1e-3, "two": 0.5, "grouped_mm": 2e-3}, "peak_bytes": {"auto": 3 << 20, "grouped_mm": 5 << 19},
    "floor_us": 40.0, "refused": {"vllm": "not installed"},
}  # fmt: skip


def test_a_line_has_every_figure():
    fields = line(RESULT, "auto", {"us": {"auto": 40.0}}).split()
    assert fields[:2] == ["S1", "16"]
    assert fields[-8:] == ["auto", "50.0", "40.0", "0.80", "1.250", "2.00", "3.0", "1.0e-03"]
    assert HEADER.split()[-5:] == ["x", "gr.mm", "MiB", "worst", "row"]
    assert line(RESULT, "grouped_mm", None).split()[-4:] == ["-", "1.00", "2.5", "2.0e-03"]


def test_a_wrong_result_prints_no_time():
    text = line(RESULT, "two", None)
    assert "WRONG" in text and "5.0e-01" in text


def test_a_peer_that_does_not_run_says_why_in_one_line():
    assert line(RESULT, "vllm", None).endswith("vllm  vllm: not installed")


def test_arguments():
    args = parse(["--adapters", "0", "4x32m", "--workspace-limit", "512"])
    assert [str(adapters) for adapters in args.adapters] == ["none", "4 x r32 + base"]
    assert args.systems == ["auto", "grouped_mm", "vllm", "sglang"]
    assert args.workspace_limit == 512 and args.pace == "turns"
    with pytest.raises(SystemExit):
        parse(["--adapters", "4y32"])
    with pytest.raises(SystemExit):
        parse(["--pace", "steady"])
