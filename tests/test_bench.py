"""What of `moelora.bench` needs no GPU: the grouped_mm composition against the oracle, and the lines it prints."""

import pytest
import torch
from layer_cases import make

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
