"""permute, activation and finalize on the GPU: the cases of the CPU tests, and buffers of more than 2^31 elements."""

import pytest
import torch
from activation_cases import *  # noqa: F403
from activation_cases import activate
from finalize_cases import *  # noqa: F403
from op_helpers import one_rounding
from permute_cases import *  # noqa: F403

from moelora import ops


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.slow
def test_permute_beyond_2_to_31_elements(device, release_memory):
    """B02: 37450 tokens, K = 8, H = 7168; row t of the tokens holds t mod 251."""
    num_tokens, top_k, hidden = 37450, 8, 7168
    values = (torch.arange(num_tokens, device=device) % 251).to(torch.bfloat16)
    x = values[:, None].expand(-1, hidden).contiguous()
    pairs = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(1)).int().to(device)
    out = ops.permute(x, pairs, top_k)
    assert out.numel() > 2**31
    for rows in (slice(0, 1000), slice(-1000, None)):
        assert torch.equal(out[rows], values[pairs[rows].long() // top_k][:, None].expand(-1, hidden))
    assert torch.equal(out[:, -1], values[pairs.long() // top_k])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "inner"), [(61682, 17408), (524289, 2048)])
@pytest.mark.parametrize("with_delta", [False, True])
def test_activation_beyond_2_to_31_elements(rows, inner, with_delta, device, release_memory):
    """D13: exact on the last rows."""
    gate_up = torch.empty(rows, 2 * inner, dtype=torch.bfloat16, device=device).normal_()
    assert gate_up.numel() > 2**31
    order = torch.arange(rows, device=device, dtype=torch.int32).flip(0)
    delta = torch.empty(rows, 1, 2 * inner, dtype=torch.bfloat16, device=device).normal_() if with_delta else None
    z, by_pair = ops.activation(gate_up, order, 1, gate_up_lora_delta=delta, lora_input=True)
    for pairs in (slice(0, 100), slice(-100, None)):
        row = order[pairs].long()
        gate, up = gate_up[row].double().chunk(2, dim=1)
        if with_delta:
            delta_gate, delta_up = delta[pairs, 0].double().chunk(2, dim=1)
            gate, up = gate + delta_gate, up + delta_up
        magnitude = (gate.abs() + 1) * (up.abs() + 1)
        one_rounding(z[row], activate(gate, up, "silu"), magnitude)
        assert torch.equal(by_pair[pairs, 0], z[row])


@pytest.mark.slow
@pytest.mark.parametrize("with_delta", [False, True])
def test_finalize_beyond_2_to_31_elements(with_delta, device, release_memory):
    """C11: 52430 tokens, K = 10, H = 4096, each row constant; exact on the last tokens."""
    num_tokens, top_k, hidden = 52430, 10, 4096
    pairs = num_tokens * top_k
    values = (torch.arange(pairs, device=device) % 64).to(torch.bfloat16)
    down = values[:, None].expand(-1, hidden).contiguous()
    assert down.numel() > 2**31
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(1)).int().to(device)
    weights = torch.full((num_tokens, top_k), 0.125, device=device)
    delta = down.view(num_tokens, top_k, hidden) if with_delta else None
    out = ops.finalize(down, weights, order, top_k=top_k, down_lora_delta=delta)
    sums = values[order.long()].view(num_tokens, top_k).float().sum(dim=1)
    if with_delta:
        sums += values.view(num_tokens, top_k).float().sum(dim=1)
    expected = (0.125 * sums).to(torch.bfloat16)
    assert torch.equal(out, expected[:, None].expand(-1, hidden))
