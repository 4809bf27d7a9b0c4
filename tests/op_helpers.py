"""Input makers and accuracy checks that the cases of permute, activation, finalize and the LoRA ops share."""

import torch

from moelora import ops
from moelora.reference import moe_sort_reference

# Largest relative error of one rounding to the dtype.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NAN = float("nan")
# Ids that name no expert of any model here.
WILD_IDS = [-1, 1024, 2**31 - 1, -(2**31)]


def random_tensor(*shape, dtype, device, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)


def random_ids(num_tokens, top_k, num_experts, device, seed=0, dtype=torch.int32):
    """Distinct random experts for every token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].to(dtype).to(device)


def random_weights(num_tokens, top_k, device, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (0.2 + torch.rand(num_tokens, top_k, generator=generator)).to(dtype).to(device)


def sort_pairs(
    ids, num_local_experts, *, expert_offset=0, adapter_ids=None, ranks=None, num_slots=0, tile_rows=16
):
    """The maps of moe_sort, made by plain Python: a fault here is not the sort op's."""
    maps = moe_sort_reference(
        ids, adapter_ids, ranks, num_slots=num_slots, num_local_experts=num_local_experts,
        expert_offset=expert_offset, tile_rows=tile_rows,
    )  # fmt: skip
    return ops.MoeSortResult(*maps)


def poisoned(*shape, dtype, device):
    """A NaN buffer between NaN guards of 32 elements: (buffer, the whole with its guards)."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 64,), NAN, dtype=dtype, device=device)
    return whole[32 : 32 + size].view(shape), whole


def assert_guards(whole):
    assert whole[:32].isnan().all() and whole[-32:].isnan().all()


def one_rounding(got, expected, magnitude=None):
    """Asserts that `got` is the float64 `expected` rounded once, element by element.

    magnitude: the sum of the absolute terms, of which fp32 sums may lose a few parts in 10^6.
    """
    assert got.shape == expected.shape
    got64 = got.double()
    magnitude = expected.abs() if magnitude is None else magnitude
    # 1.02: the fp32 result may lie on the other side of a tie. The last term is for subnormal fp16.
    allowed = 1.02 * UNIT_ROUNDOFF[got.dtype] * expected.abs() + 4e-6 * magnitude + 1e-7
    bad = ~((got64 - expected).abs() <= allowed)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are off, first {where}: "
            f"{got64[tuple(where)].item()} instead of {expected[tuple(where)].item()}"
        )


def repeats(device):
    """How often a test of equal bits runs the op: an order that varies shows on a GPU only."""
    return 200 if device == "cuda" else 4


def bits(tensor):
    """The bytes of a tensor, so that comparing them tells NaNs and zeros of both signs apart."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
