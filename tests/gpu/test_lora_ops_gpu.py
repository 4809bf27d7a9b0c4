"""lora_shrink and lora_expand on the GPU: the cases of the CPU tests, and deltas of more than 2^31 elements."""

import pytest
import torch
from lora_expand_cases import *  # noqa: F403
from lora_expand_cases import oracle as expand_oracle
from lora_shrink_cases import *  # noqa: F403
from lora_shrink_cases import oracle as shrink_oracle
from op_helpers import one_rounding, random_ids, random_tensor

from moelora import ops


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.slow
def test_expand_beyond_2_to_31_elements(device, release_memory):
    """C04: 65600 tokens, K = 8, 2I = 4096; the last tokens equal the oracle of just those tokens."""
    num_tokens, top_k, width, rank, num_experts = 65600, 8, 4096, 16, 16
    ids = random_ids(num_tokens, top_k, num_experts, device)
    v = torch.empty(num_tokens * top_k, 2 * rank, device=device).normal_()
    lora_b = random_tensor(1, num_experts, width, rank, dtype=torch.bfloat16, device=device)
    sort = ops.moe_sort(ids, num_local_experts=num_experts, num_slots=1)
    delta = ops.lora_expand(v, lora_b, ids, part="gate_up", num_local_experts=num_experts, sort=sort)
    assert delta.numel() > 2**31
    for tokens in (slice(0, 100), slice(num_tokens - 100, num_tokens)):
        some = v.view(num_tokens, top_k, -1)[tokens].flatten(0, 1)
        one_rounding(delta[tokens], *expand_oracle(some, lora_b, ids[tokens], num_local=num_experts))


@pytest.mark.slow
def test_shrink_beyond_2_to_31_elements(device, release_memory):
    """C04: activation_lora_input of 70000 tokens, K = 8, I = 4096, and A x of the last tokens."""
    num_tokens, top_k, width, rank, num_experts = 70000, 8, 4096, 8, 16
    ids = random_ids(num_tokens, top_k, num_experts, device)
    x = torch.empty(num_tokens, top_k, width, dtype=torch.bfloat16, device=device).normal_()
    assert x.numel() > 2**31
    lora_a = random_tensor(1, num_experts, rank, width, dtype=torch.bfloat16, device=device)
    sort = ops.moe_sort(ids, num_local_experts=num_experts, num_slots=1)
    options = {"rank": rank, "part": "down"}
    v = ops.lora_shrink(x, lora_a, ids, num_local_experts=num_experts, sort=sort, **options)
    v = v.view(num_tokens, top_k, rank)
    for tokens in (slice(0, 100), slice(num_tokens - 100, num_tokens)):
        expected, size = shrink_oracle(x[tokens], lora_a, ids[tokens], num_local=num_experts, **options)
        assert ((v[tokens].flatten(0, 1).double() - expected).abs() <= 4e-6 * size).all()
