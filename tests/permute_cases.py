"""Tests of permute for any device: a test file imports them and provides the fixtures `device` and `dtype`."""

import pytest
import torch
from op_helpers import assert_guards, poisoned, random_ids, random_tensor, random_weights, same_bits, sort_pairs

from moelora import ops

SHAPES = [  # tokens, top_k, experts, hidden
    (1, 1, 1, 8),
    (1, 8, 128, 2048),
    (3, 2, 8, 2880),
    (17, 4, 5, 24),
    (300, 8, 64, 1032),
    (5, 32, 40, 7168),
]


def gathered(x, sort, top_k):
    """The rows that permute must write, and which rows those are."""
    pairs = sort.permuted_to_expanded.long()
    real = pairs >= 0
    return x[pairs[real] // top_k], real


def permute_into_poison(x, permuted_to_expanded, top_k, row_weights=None):
    out, whole = poisoned(permuted_to_expanded.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    torch.ops.moelora.permute.out(x, permuted_to_expanded, top_k, row_weights, out=out)
    assert_guards(whole)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_permute_copies_rows_and_leaves_padding_unwritten(shape, device, dtype):
    """B05: padding rows keep what they held."""
    num_tokens, top_k, num_experts, hidden = shape
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device)
    sort = sort_pairs(random_ids(num_tokens, top_k, num_experts, device), num_experts)
    out = permute_into_poison(x, sort.permuted_to_expanded, top_k)
    expected, real = gathered(x, sort, top_k)
    assert same_bits(out[real], expected)
    assert out[~real].isnan().all()


def test_permute_functional_form_equals_out_form(device, dtype):
    x = random_tensor(6, 40, dtype=dtype, device=device)
    sort = sort_pairs(random_ids(6, 2, 4, device), 4)
    expected, real = gathered(x, sort, 2)
    assert torch.equal(torch.ops.moelora.permute(x, sort.permuted_to_expanded, 2)[real], expected)
    assert torch.equal(ops.permute(x, sort.permuted_to_expanded, 2)[real], expected)


def test_permute_skips_pairs_that_are_not_local(device, dtype):
    """B02, B12: ids of -1, of other processes and garbage leave no row."""
    x = random_tensor(4, 16, dtype=dtype, device=device)
    ids = torch.tensor([[-1, 5], [2**31 - 1, 4], [-(2**31), 7], [3, 8]], dtype=torch.int32, device=device)
    sort = sort_pairs(ids, 4, expert_offset=4)
    out = permute_into_poison(x, sort.permuted_to_expanded, 2)
    expected, real = gathered(x, sort, 2)
    assert int(real.sum()) == 3
    assert torch.equal(out[real], expected)
    assert out[~real].isnan().all()


def test_permute_reads_nothing_for_indices_out_of_range(device, dtype):
    """B12: a map entry that names no pair writes nothing, whatever its value."""
    x = random_tensor(3, 8, dtype=dtype, device=device)
    pairs = torch.tensor([0, -1, 6, 2**31 - 1, -(2**31), 5], dtype=torch.int32, device=device)
    out = permute_into_poison(x, pairs, 2)
    assert torch.equal(out[[0, 5]], x[[0, 2]])
    assert out[1:5].isnan().all()


def test_permute_then_finalize_gives_the_tokens_back(device, dtype):
    """B04: an order without two-cycles, so that forward and inverse maps cannot be confused."""
    num_tokens, top_k, num_experts = 97, 6, 64
    x = torch.arange(num_tokens, device=device, dtype=torch.float32)[:, None].expand(-1, 16).to(dtype).contiguous()
    sort = sort_pairs(random_ids(num_tokens, top_k, num_experts, device), num_experts)
    permuted = permute_into_poison(x, sort.permuted_to_expanded, top_k)
    weights = torch.full((num_tokens, top_k), 1 / top_k, device=device)
    out = ops.finalize(permuted, weights, sort.expanded_to_permuted, top_k=top_k)
    assert torch.equal(out.round(), x)  # 6 * fp32(1/6) is not quite 1


def test_permute_reads_only_the_tokens_at_the_end_of_an_allocation(device, dtype):
    """B05: one token at the very end of its storage, an expert padded to 128 rows."""
    whole = random_tensor(4, 64, dtype=dtype, device=device)
    x = whole[3:]
    sort = sort_pairs(torch.tensor([[5]], dtype=torch.int32, device=device), 8, tile_rows=128)
    out = permute_into_poison(x, sort.permuted_to_expanded, 1)
    assert torch.equal(out[0], x[0])
    assert out[1:].isnan().all()


@pytest.mark.parametrize(("num_tokens", "top_k"), [(8191, 8), (8192, 8), (8193, 8), (6554, 10)])
def test_permute_of_more_than_65535_pairs(num_tokens, top_k, device, dtype):
    """B06, B10: nothing is laid out along a grid dimension that ends at 65535."""
    x = random_tensor(num_tokens, 8, dtype=dtype, device=device)
    pairs = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(1)).int().to(device)
    out = permute_into_poison(x, pairs, top_k)
    assert torch.equal(out, x[pairs.long() // top_k])


def test_permute_of_no_tokens(device, dtype):
    """B11: T = 0 defines an empty result."""
    x = torch.empty(0, 64, dtype=dtype, device=device)
    out = ops.permute(x, torch.empty(0, dtype=torch.int32, device=device), 8)
    assert out.shape == (0, 64)
    # All map entries are padding: nothing is read.
    assert permute_into_poison(x, torch.full((16,), -1, dtype=torch.int32, device=device), 8).isnan().all()


def test_permute_accepts_a_column_slice(device, dtype):
    """C10: a row stride beyond the row size."""
    wide = random_tensor(5, 96, dtype=dtype, device=device)
    x = wide[:, 16:80]
    sort = sort_pairs(random_ids(5, 2, 4, device), 4)
    out = permute_into_poison(x, sort.permuted_to_expanded, 2)
    expected, real = gathered(x, sort, 2)
    assert torch.equal(out[real], expected)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_permute_weights_the_rows_once(weights_dtype, device, dtype):
    """D06: the weight-on-input mode multiplies in fp32 and rounds once; strided weights are honoured."""
    x = random_tensor(9, 48, dtype=dtype, device=device, scale=4.0)
    weights = random_weights(9, 2, device, dtype=weights_dtype).repeat(1, 2)[:, 0::2]
    assert weights.shape == (9, 2) and weights.stride() != (2, 1)
    sort = sort_pairs(random_ids(9, 2, 4, device), 4)
    out = permute_into_poison(x, sort.permuted_to_expanded, 2, weights)
    pairs = sort.permuted_to_expanded.long()
    real = pairs >= 0
    by_pair = (weights.float()[:, :, None] * x.float()[:, None]).to(dtype).flatten(0, 1)
    assert torch.equal(out[real], by_pair[pairs[real]])
    assert not torch.equal(out[real], x[pairs[real] // 2])


@pytest.mark.parametrize("hidden", [1004, 12])
def test_permute_refuses_odd_row_sizes(hidden, device, dtype):
    """B11: rows that 16-byte accesses cannot cover are refused by name."""
    x = torch.zeros(2, hidden, dtype=dtype, device=device)
    with pytest.raises(ValueError, match="hidden_states"):
        ops.permute(x, torch.zeros(2, dtype=torch.int32, device=device), 1)


def test_permute_refuses_bad_arguments(device, dtype):
    """B11, C10, D05, K12: every message names the argument."""
    x = torch.zeros(2, 64, dtype=dtype, device=device)
    pairs = torch.zeros(4, dtype=torch.int32, device=device)
    shifted = torch.zeros(2 * 64 + 1, dtype=dtype, device=device)[1:].view(2, 64)
    odd_stride = torch.zeros(2, 65, dtype=dtype, device=device)[:, :64]
    transposed = torch.zeros(64, 2, dtype=dtype, device=device).t()
    for bad in (shifted, odd_stride, transposed, x[None]):
        with pytest.raises(ValueError, match="hidden_states"):
            ops.permute(bad, pairs, 2)
    for bad_dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="hidden_states"):
            ops.permute(x.to(bad_dtype), pairs, 2)
    with pytest.raises(TypeError, match="permuted_to_expanded"):
        ops.permute(x, pairs.long(), 2)
    with pytest.raises(ValueError, match="permuted_to_expanded"):
        ops.permute(x, pairs.repeat(2)[::2], 2)
    with pytest.raises(ValueError, match="top_k"):
        ops.permute(x, pairs, 0)
    with pytest.raises(ValueError, match="row_weights"):
        ops.permute(x, pairs, 2, torch.zeros(2, 1, device=device))
    with pytest.raises(TypeError, match="row_weights"):
        ops.permute(x, pairs, 2, torch.zeros(2, 2, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="hidden_states"):
        ops.permute(x.float().requires_grad_().to(dtype), pairs, 2)
    for bad_out in (
        torch.empty(3, 64, dtype=dtype, device=device),
        torch.empty(4, 128, dtype=dtype, device=device)[:, :64],
        x.new_zeros(8, 64)[::2],
    ):
        with pytest.raises(RuntimeError, match="out"):
            torch.ops.moelora.permute.out(x, pairs, 2, None, out=bad_out)
    whole = torch.zeros(4, 64, dtype=dtype, device=device)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.ops.moelora.permute.out(whole[:2], pairs, 2, None, out=whole)


def test_permute_passes_opcheck(device, dtype):
    x = random_tensor(6, 40, dtype=dtype, device=device)
    sort = sort_pairs(random_ids(6, 2, 4, device), 4)
    # Without padding rows, which hold anything.
    pairs = sort.permuted_to_expanded[sort.permuted_to_expanded >= 0]
    for weights in (None, random_weights(6, 2, device)):
        torch.library.opcheck(torch.ops.moelora.permute.default, (x, pairs, 2, weights))
