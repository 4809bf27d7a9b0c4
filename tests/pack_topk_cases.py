"""Tests of pack_topk and unpack_topk for any device: a test file imports them and has the fixture `device`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moelora
from moelora.reference import pack_topk_reference, unpack_topk_reference

INF, NAN = float("inf"), float("nan")
POISON = 0x7FFFFFFF


def pack(weights, ids):
    """pack_topk into a poisoned buffer."""
    out = torch.full(ids.shape, POISON, dtype=torch.int32, device=ids.device)
    torch.ops.moelora.pack_topk.out(weights, ids, out=out)
    return out


def unpack(packed):
    """unpack_topk into poisoned buffers."""
    weights = torch.full(packed.shape, NAN, device=packed.device)
    ids = torch.full(packed.shape, POISON, dtype=torch.int32, device=packed.device)
    torch.ops.moelora.unpack_topk.out(packed, topk_weights=weights, topk_ids=ids)
    return weights, ids


def random_choice(num_tokens, top_k, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_tokens, top_k, generator=generator)
    ids = torch.randint(-1, 1024, (num_tokens, top_k), generator=generator)
    return weights.to(device), ids.int().to(device)


@pytest.mark.parametrize("num_tokens,top_k", [(0, 8), (1, 1), (1, 8), (7, 32), (513, 8), (40_000, 8)])
def test_packing_matches_the_reference_and_unpacking_gives_it_back(device, num_tokens, top_k):
    weights, ids = random_choice(num_tokens, top_k, device)
    words = pack(weights, ids)
    assert torch.equal(words, pack_topk_reference(weights, ids))
    unpacked_weights, unpacked_ids = unpack(words)
    assert torch.equal(unpacked_ids, ids)
    assert torch.equal(unpacked_weights, weights.bfloat16().float())
    reference_weights, reference_ids = unpack_topk_reference(words)
    assert torch.equal(unpacked_weights, reference_weights)
    assert torch.equal(unpacked_ids, reference_ids)


def test_minus_one_survives_and_negative_weights_leave_the_id_alone(device):
    ids = torch.tensor([[-1, 0, 5, 255, 32767]], dtype=torch.int32, device=device)
    for value in (-1.5, -0.0, 0.0, 2.0, -INF, INF):
        weights = torch.full((1, 5), value, device=device)
        unpacked_weights, unpacked_ids = unpack(pack(weights, ids))
        assert torch.equal(unpacked_ids, ids)
        assert torch.equal(unpacked_weights, weights)
        assert torch.equal(torch.signbit(unpacked_weights), torch.signbit(weights))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_do_not_fit_count_as_none(device, dtype):
    values = [32768, 65536, 65541, 2**31 - 1, -2, -32768, -32769, -(2**31)]
    if dtype == torch.int64:
        values += [2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63), -1]
    ids = torch.tensor([values], dtype=dtype, device=device)
    weights, unpacked_ids = unpack(pack(torch.full(ids.shape, 0.5, device=device), ids))
    assert (unpacked_ids == -1).all()
    assert (weights == 0.5).all()


def test_weights_round_to_nearest_even(device):
    # Between the neighbours 1 and 1 + 2^-7 below, at and above the middle; then the middle above an odd neighbour.
    step = 2.0**-7
    weights = torch.tensor([[1 + step * 0.49, 1 + step / 2, 1 + step * 0.51, 1 + step * 1.5, 1e-40, 3.4e38]])
    expected = torch.tensor([[1.0, 1.0, 1 + step, 1 + step * 2, 1e-40, INF]]).bfloat16().float()
    ids = torch.zeros(1, 6, dtype=torch.int32, device=device)
    assert torch.equal(unpack(pack(weights.to(device), ids))[0].cpu(), expected)


def test_nan_weights_stay_nan(device):
    bits = torch.tensor([[0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF]], dtype=torch.int32)
    ids = torch.full((1, 5), 7, dtype=torch.int32, device=device)
    weights, unpacked_ids = unpack(pack(bits.view(torch.float32).to(device), ids))
    assert weights.isnan().all()
    assert (unpacked_ids == 7).all()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_strides_and_dtypes(device, weight_dtype, id_dtype):
    weights, ids = random_choice(50, 12, device)
    weights, ids = weights.to(weight_dtype), ids.to(id_dtype)
    for view in (lambda t: t[:, 3:9], lambda t: t[:, ::4], lambda t: t.t().contiguous().t(), lambda t: t[::3]):
        words = pack(view(weights), view(ids))
        assert words.is_contiguous()
        assert torch.equal(words, pack_topk_reference(view(weights), view(ids)))
        assert torch.equal(words, pack(view(weights).contiguous(), view(ids).contiguous()))
    wide = pack(weights, ids)
    assert torch.equal(unpack(wide[:, 2:7])[1], unpack(wide[:, 2:7].contiguous())[1])
    assert torch.equal(unpack(wide[:, ::2])[0], unpack(wide[:, ::2].contiguous())[0])


def test_the_wrappers_and_the_functional_forms_give_the_same(device):
    weights, ids = random_choice(9, 4, device)
    words = pack(weights, ids)
    assert torch.equal(moelora.ops.pack_topk(weights, ids), words)
    assert torch.equal(torch.ops.moelora.pack_topk(weights, ids), words)
    for given_weights, given_ids in (moelora.ops.unpack_topk(words), torch.ops.moelora.unpack_topk(words)):
        assert torch.equal(given_weights, unpack(words)[0])
        assert torch.equal(given_ids, unpack(words)[1])


@settings(max_examples=100, deadline=None)
@given(
    word=st.integers(-65536, 2**31 - 1),
    weight=st.floats(width=32, allow_nan=False),
    expert=st.integers(-(2**31), 2**31 - 1),
)
def test_any_word_and_any_choice_round_trip(device, word, weight, expert):
    words = torch.tensor([[word]], dtype=torch.int32, device=device)
    weights, ids = unpack(words)
    if not weights.isnan().any():
        assert torch.equal(pack(weights, ids), words)
    weights = torch.tensor([[weight]], dtype=torch.float32, device=device)
    ids = torch.tensor([[expert]], dtype=torch.int32, device=device)
    assert torch.equal(pack(weights, ids), pack_topk_reference(weights, ids))


def test_wrong_tensors_are_refused_by_name(device):
    """A11"""
    weights, ids = random_choice(3, 4, device)
    for dtype in (torch.int16, torch.float32):
        with pytest.raises(TypeError, match="topk_ids"):
            moelora.ops.pack_topk(weights, ids.to(dtype))
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(TypeError, match="topk_weights"):
            moelora.ops.pack_topk(weights.to(dtype), ids)
    with pytest.raises(ValueError, match=r"topk_weights.*\[3, 4\].*\[3, 3\]"):
        moelora.ops.pack_topk(weights[:, :3], ids)
    with pytest.raises(ValueError, match="topk_ids"):
        moelora.ops.pack_topk(weights, ids[0])
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(TypeError, match="packed"):
            moelora.ops.unpack_topk(ids.to(dtype))
    with pytest.raises(RuntimeError, match="type error: out"):
        torch.ops.moelora.pack_topk.out(weights, ids, out=torch.zeros(3, 4, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match=r"out.*topk_ids"):
        torch.ops.moelora.pack_topk.out(weights, ids, out=ids)
