"""The oracle against the Hugging Face cases, and against a per-token loop where it has more to do."""

import pytest
import torch
from conformance_cases import CASE_NAMES, adapter_cases, load_case, relative_error

from moelora.lora import MoELoRA
from moelora.reference import moe_lora_reference, route_reference

TOLERANCE = 1e-6  # the recorded outputs are float32 and within 6e-7 of a float64 recomputation


def run_case(case, lora=None, adapter_ids=None, **options):
    return moe_lora_reference(
        case.hidden_states,
        case.weights.w13,
        case.weights.w2,
        case.topk_weights,
        case.topk_ids,
        lora=lora,
        adapter_ids=adapter_ids,
        **(case.forward_options | options),
    )


@pytest.mark.parametrize("name", CASE_NAMES)
def test_base_output_matches_hugging_face(name):
    case = load_case(name)
    assert relative_error(run_case(case), case.expected()) < TOLERANCE


@pytest.mark.parametrize(("name", "adapter"), adapter_cases())
def test_adapter_output_matches_peft(name, adapter):
    case = load_case(name)
    assert relative_error(run_case(case, case.load_adapter(adapter)), case.expected(adapter)) < TOLERANCE


@pytest.mark.parametrize("name", CASE_NAMES)
def test_mixed_batch_matches_hugging_face(name):
    case = load_case(name)
    lora = MoELoRA.stack([case.load_adapter(adapter) for adapter in case.adapters])
    assert relative_error(run_case(case, lora, case.mixed_adapter_ids), case.expected_mixed) < TOLERANCE


@pytest.mark.parametrize("name", CASE_NAMES)
def test_routing_matches_hugging_face(name):
    case = load_case(name)
    weights, ids = route_reference(
        case.tensors["router_logits"], case.topk_ids.shape[1], **case.route_options
    )
    expected_ids, expected_weights = case.topk_ids, case.topk_weights
    if not case.info["routing"]["topk_ids_sorted_by_weight"]:
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
        expected_ids, order = expected_ids.sort(dim=1)
        expected_weights = expected_weights.gather(1, order)
    assert torch.equal(ids.long(), expected_ids)
    assert relative_error(weights, expected_weights) < TOLERANCE
