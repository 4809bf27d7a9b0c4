"""routing on the GPU: every test of the CPU, and agreement with the CPU to the bit."""

import pytest
import torch
from routing_cases import *  # noqa: F403
from routing_cases import DTYPES, METHODS, NAN, random_logits, route, top_k_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0, 60.0])
@pytest.mark.parametrize("method", METHODS)
def test_gpu_and_cpu_give_the_same_bits(device, method, scale, dtype):
    """Scale 60 makes probabilities underflow and sigmoids saturate, so that rounding decides ties."""
    for num_experts in (128, 256, 1000):
        options = {"n_group": 8, "topk_group": 3} if method == "deepseek_v3" else METHODS[method]
        logits = random_logits(3000, num_experts, dtype, scale=scale)
        logits[5, ::3] = NAN
        weights, ids = route(logits.to(device), top_k_of(method), method, **options)
        expected_weights, expected_ids = route(logits, top_k_of(method), method, **options)
        assert torch.equal(ids.cpu(), expected_ids)
        assert torch.equal(weights.cpu(), expected_weights)


def test_a_graph_replay_reads_the_new_logits_and_count(device):
    logits = random_logits(16, 128, device=device)
    count = torch.tensor(16, dtype=torch.int32, device=device)
    route(logits, 8, num_valid_tokens=count)
    graph = torch.cuda.CUDAGraph()
    weights = torch.empty(16, 8, device=device)
    ids = torch.empty(16, 8, dtype=torch.int32, device=device)
    with torch.cuda.graph(graph):
        torch.ops.moelora.routing.out(logits, 8, 1, num_valid_tokens=count, topk_weights=weights, topk_ids=ids)
    for seed, valid in ((1, 16), (2, 5), (3, 0)):
        logits.copy_(random_logits(16, 128, seed=seed))
        count.fill_(valid)
        graph.replay()
        expected_weights, expected_ids = route(logits, 8, num_valid_tokens=count)
        assert torch.equal(weights, expected_weights)
        assert torch.equal(ids, expected_ids)


@pytest.mark.slow
def test_logits_beyond_2_to_the_31_elements(device):
    """A05, B02: 64-bit indices."""
    num_tokens = 2**31 // 1024 + 7
    logits = torch.zeros(num_tokens, 1024, dtype=torch.bfloat16, device=device)
    last = random_logits(1, 1024, torch.bfloat16, device=device)
    logits[-1:] = last
    weights, ids = route(logits, 8)
    expected_weights, expected_ids = route(last, 8)
    assert torch.equal(weights[-1:], expected_weights)
    assert torch.equal(ids[-1:], expected_ids)
