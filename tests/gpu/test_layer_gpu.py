"""The whole layer on the GPU: the tests of the CPU, bad input included, and what only a GPU can show."""

import pytest
import torch
from adapter_cases import *  # noqa: F403
from error_cases import *  # noqa: F403
from layer_cases import *  # noqa: F403
from layer_cases import ACTIVATIONS, LAYOUTS, check, make, oracle, run
from parallel_cases import *  # noqa: F403

import moelora
from moelora.reference import gate_up_lora_delta_reference
from moelora.testing import Shape, check_close, random_layer, random_lora
from moelora.testing.inputs import MODEL_SHAPES, random_adapter_ids


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 16, 33, 64, 130, 256, 512, 1100, 2048, 4096])
@pytest.mark.parametrize("with_lora", [False, True])
def test_token_counts_at_a_real_models_sizes(device, dtype, tokens, with_lora):
    """C12, E03: Qwen3-30B-A3B, on both sides of every bound that picks a kernel"""
    layer, lora, adapter_ids = make(tokens, device, dtype, MODEL_SHAPES["qwen3_30b_a3b"], rank=16)
    if with_lora:
        check(layer, lora, adapter_ids)
    else:
        check(layer)


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128, 256])
def test_ranks_at_a_real_models_sizes(device, dtype, tokens, rank):
    """D08, D09"""
    shape = Shape(2048, 768, 16, 8)
    layer, lora, adapter_ids = make(tokens, device, dtype, shape, slots=2, rank=rank)
    check(layer, lora, adapter_ids)


@pytest.mark.parametrize("tokens", [257, 600, 1000, 2100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_shape_of_prefill(device, dtype, tokens, layout):
    """C07: 65, 150, 250 and 525 rows an expert pick one each; sizes that are no multiple of any of them"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(136, 200, 8, 2), rank=24)
    activation = ACTIVATIONS[LAYOUTS.index(layout)]
    check(layer, lora, adapter_ids, gate_up_layout=layout, activation=activation, **layer.biases)


@pytest.mark.parametrize("tokens", [1, 3, 64, 1024])
def test_modes_give_the_same_bits(device, dtype, tokens):
    """single and two streams"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(512, 256, 16, 4), rank=16)
    single = run(layer, lora, adapter_ids, stream_mode="single")
    two = run(layer, lora, adapter_ids, stream_mode="two")
    assert torch.equal(single, two)
    assert torch.equal(
        single, moelora.fused_moe_lora_single_stream(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    )
    assert torch.equal(two, moelora.fused_moe_lora_two_stream(*layer.arguments, lora=lora, adapter_ids=adapter_ids))


def test_the_same_call_on_the_cpu_agrees(device, dtype):
    """K09"""
    shape = Shape(256, 128, 16, 4)
    layer, lora, adapter_ids = make(37, "cpu", dtype, shape, rank=16)
    expected = oracle(layer, lora, adapter_ids)
    on_cpu = run(layer, lora, adapter_ids)
    moved = layer.with_(**{name: getattr(layer, name).to(device) for name in vars(layer)})
    on_gpu = run(moved, lora.to(device), adapter_ids.to(device))
    check_close(on_cpu, expected)
    check_close(on_gpu.cpu(), expected)


def test_float32_on_the_gpu_is_refused_by_name(device):
    layer = random_layer(3, Shape(64, 32, 4, 2), dtype=torch.float32, device=device)
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16 or float16 on CUDA, got float32"):
        moelora.fused_moe_lora(*layer.arguments)


@pytest.mark.parametrize("delay", ["producer", "consumer"])
def test_the_events_of_the_caller_order_its_own_streams(device, dtype, delay):
    """lora_ready_event is waited for before the delta is read; down_gemm_done_event comes after the down GEMM"""
    layer, lora, adapter_ids = make(64, device, dtype, Shape(512, 256, 16, 4))
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora, adapter_ids).to(dtype)
    expected = run(layer, gate_up_lora_delta=delta)
    buffer = torch.full_like(delta, torch.nan)
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if delay == "producer":
            torch.cuda._sleep(20_000_000)
        buffer.copy_(delta)
        ready.record()
    if delay == "consumer":
        torch.cuda._sleep(20_000_000)
    out = moelora.fused_moe_lora(
        *layer.arguments, gate_up_lora_delta=buffer, lora_ready_event=ready, down_gemm_done_event=done
    )
    done.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_an_allocation_that_fails_can_be_caught(device, dtype):
    """torch.OutOfMemoryError, nothing half-written, and the next call works"""
    layer, lora, adapter_ids = make(4096, device, dtype, Shape(2048, 768, 16, 8))
    out = torch.full_like(layer.hidden_states, 7)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, out=out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (out == 7).all()
    check(layer, lora, adapter_ids)


def check_last_tokens(tokens, shape, device, dtype, count=100):
    """The last tokens of a huge call against the oracle of just those tokens."""
    layer = random_layer(tokens, shape, dtype=dtype, device=device)
    lora = random_lora(2, shape, 16, dtype=dtype, device=device)
    adapter_ids = random_adapter_ids(tokens, 2, device=device)
    last = slice(tokens - count, tokens)
    with torch.inference_mode():
        for options in ({}, {"lora": lora, "adapter_ids": adapter_ids}):
            got = moelora.fused_moe_lora(*layer.arguments, **options)[last]
            some = {"lora": lora, "adapter_ids": adapter_ids[last]} if options else {}
            check_close(got, oracle(layer.tokens(last), **some))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(65_600, Shape(2048, 2048, 16, 8)), (56_000, Shape(7168, 256, 16, 8))],
    ids=["gate_up rows", "down rows"],
)
def test_calls_beyond_2_to_31_elements(device, release_memory, tokens, shape):
    """C04, B10: T*K*2I and T*K*H pass 2^31"""
    check_last_tokens(tokens, shape, device, torch.bfloat16)


@pytest.mark.slow
def test_weights_beyond_2_to_31_elements(device, release_memory):
    """C04: E*2I*H passes 2^31; the last expert's rows"""
    shape = Shape(4096, 2048, 160, 1)
    layer = random_layer(64, shape, dtype=torch.bfloat16, device=device)
    layer = layer.with_(topk_ids=159 - layer.topk_ids % 3)
    check(layer)
