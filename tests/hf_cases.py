"""Every case of tests/conformance through the public calls, for any device: route, load, stack, forward.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

from dataclasses import dataclass

import pytest
import torch
from conformance_cases import CASE_NAMES, adapter_cases, load_case

import moelora
from moelora.testing import poisoned_memory, relative_error, row_errors

# Of a row, and of the whole (relative Frobenius norm). The data holds values that bf16 represents exactly.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Block:
    """A case on a device: what a caller of the layer would hold."""

    arguments: tuple
    options: dict


def block(name, device, dtype):
    case = load_case(name)
    weights, ids = moelora.route(
        case.tensors["router_logits"].to(device),
        case.topk_ids.shape[1],
        **{key: _moved(value, device) for key, value in case.route_options.items()},
    )
    tensors = [tensor.to(device, dtype) for tensor in (case.hidden_states, case.weights.w13, case.weights.w2)]
    options = {
        key: _moved(value, device, dtype) for key, value in case.forward_options.items() if value is not None
    }
    return Block((*tensors, weights, ids), options)


def _moved(value, device, dtype=None):
    return value.to(device, dtype) if isinstance(value, torch.Tensor) else value


def check(block, expected, **options):
    with torch.inference_mode(), poisoned_memory():
        got = moelora.fused_moe_lora(*block.arguments, **block.options, **options)
    expected = expected.to(got.device)
    assert relative_error(got, expected) < BOUNDS[got.dtype]
    assert row_errors(got, expected).max().item() < BOUNDS[got.dtype]


@pytest.mark.parametrize("name", CASE_NAMES)
def test_base_output_is_hugging_faces(device, dtype, name):
    check(block(name, device, dtype), load_case(name).expected())


@pytest.mark.parametrize(("name", "adapter"), adapter_cases())
def test_adapter_output_is_pefts(device, dtype, name, adapter):
    case = load_case(name)
    lora = case.load_adapter(adapter, dtype=dtype, device=device)
    check(block(name, device, dtype), case.expected(adapter), lora=lora)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_mixed_batch_takes_each_row_from_its_adapter(device, dtype, name):
    case = load_case(name)
    lora = moelora.MoELoRA.stack([case.load_adapter(adapter, dtype=dtype) for adapter in case.adapters])
    adapter_ids = case.mixed_adapter_ids.to(device)
    check(block(name, device, dtype), case.expected_mixed, lora=lora.to(device), adapter_ids=adapter_ids)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_routing_is_hugging_faces(device, name):
    case = load_case(name)
    _, _, _, weights, ids = block(name, device, torch.float32 if device == "cpu" else torch.bfloat16).arguments
    weights, ids = weights.cpu(), ids.cpu().long()
    expected_ids, expected_weights = case.topk_ids, case.topk_weights
    if not case.info["routing"]["topk_ids_sorted_by_weight"]:
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
        expected_ids, order = expected_ids.sort(dim=1)
        expected_weights = expected_weights.gather(1, order)
    assert torch.equal(ids, expected_ids)
    assert relative_error(weights, expected_weights) < 1e-6


@pytest.mark.parametrize(("name", "adapter"), adapter_cases(refused=True))
def test_adapters_that_are_not_plain_are_refused(name, adapter):
    """J14"""
    with pytest.raises(ValueError, match=r"DoRA|lora_bias|magnitude|bias"):
        load_case(name).load_adapter(adapter)
