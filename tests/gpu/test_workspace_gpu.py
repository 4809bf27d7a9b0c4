"""A bounded workspace on the GPU: the tests of the CPU, real sizes, and what the allocator saw."""

import pytest
import torch
from layer_cases import make, oracle, run
from workspace_cases import *  # noqa: F403

import moelora
from moelora.bench.timing import peak_bytes
from moelora.testing import Shape, check_close


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("mode", ["auto", "single", "two"])
def test_chunks_of_a_real_models_sizes_bound_what_is_allocated(device, dtype, mode):
    """At most the limit and the output are taken; the chunked result is within bounds of the oracle and repeats"""
    shape, tokens, limit = Shape(2048, 768, 16, 8), 8192, 512 << 20
    layer, lora, adapter_ids = make(tokens, device, dtype, shape, rank=16)
    options = {"lora": lora, "adapter_ids": adapter_ids, "stream_mode": mode}

    def peak(limit):
        outs = []
        with torch.inference_mode():
            taken = peak_bytes(
                lambda: outs.append(
                    moelora.fused_moe_lora(*layer.arguments, **options, workspace_limit_bytes=limit)
                )
            )
        return outs[0], taken - outs[0].numel() * outs[0].element_size()

    whole, unbounded = peak(None)
    chunked, bounded = peak(limit)
    # The allocator rounds up to 512 bytes.
    assert bounded <= limit + 1024 < unbounded
    check_close(whole, oracle(layer, lora, adapter_ids))
    check_close(chunked, oracle(layer, lora, adapter_ids))
    assert torch.equal(chunked, run(layer, lora, adapter_ids, stream_mode=mode, workspace_limit_bytes=limit))


@pytest.mark.parametrize("mode", ["auto", "single", "two"])
def test_a_chunked_call_replays(device, mode):
    """In a CUDA graph, with new contents of the inputs"""
    shape, tokens, limit = Shape(512, 256, 16, 4), 5000, 48 << 20
    layer, lora, adapter_ids = make(tokens, device, torch.bfloat16, shape, rank=16)
    options = {"stream_mode": mode, "workspace_limit_bytes": limit}
    run(layer, lora, adapter_ids, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)
    for seed in (1, 2):
        other, _, other_ids = make(tokens, device, torch.bfloat16, shape, rank=16, seed=seed)
        layer.hidden_states.copy_(other.hidden_states)
        layer.topk_ids.copy_(other.topk_ids)
        adapter_ids.copy_(other_ids)
        graph.replay()
        assert torch.equal(out, run(layer, lora, adapter_ids, **options))
        check_close(out, oracle(layer, lora, adapter_ids))


@pytest.mark.parametrize("mode", ["auto", "single", "two"])
def test_explain_tells_of_the_chunks(device, mode):
    """Where moelora._C is built for this Python"""
    pytest.importorskip("moelora._C", exc_type=ImportError)
    layer, lora, adapter_ids = make(8192, device, torch.bfloat16, Shape(2048, 768, 16, 8), rank=16)
    options = {"lora": lora, "adapter_ids": adapter_ids, "stream_mode": mode}
    assert "chunks of" in moelora.explain(*layer.arguments, **options, workspace_limit_bytes=128 << 20)
