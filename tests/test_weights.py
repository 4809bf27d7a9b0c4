"""Row orders of gate and up, and the preparation for FlashInfer's TRT-LLM kernels."""

import pytest
import torch

from moelora.weights import (
    from_flashinfer_down,
    from_flashinfer_gate_up,
    split_gate_up,
    swap_gate_up,
    to_flashinfer_down,
    to_flashinfer_gate_up,
)


def numbered(*shape, dtype=torch.float32):
    """Every element different."""
    size = torch.Size(shape).numel()
    if dtype == torch.bfloat16:
        assert size <= 2**15
        return torch.arange(size, dtype=torch.int16).view(torch.bfloat16).reshape(shape)
    return torch.arange(size, dtype=torch.float32).reshape(shape).to(dtype)


def bits(tensor):
    return tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)


def test_swap_gate_up_exchanges_the_halves():
    gate, up = torch.full((2, 3, 5), 1.0), torch.full((2, 3, 5), -7.0)
    swapped = swap_gate_up(torch.cat((gate, up), dim=-1))
    assert torch.equal(swapped[..., :5], up)
    assert torch.equal(swapped[..., 5:], gate)
    assert torch.equal(swap_gate_up(swapped), torch.cat((gate, up), dim=-1))


def test_swap_gate_up_refuses_an_odd_width():
    with pytest.raises(ValueError, match="delta"):
        swap_gate_up(torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("layout", "gate", "up"),
    [
        ("gate_up", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("up_gate", [4, 5, 6, 7], [0, 1, 2, 3]),
        ("interleaved", [0, 2, 4, 6], [1, 3, 5, 7]),
    ],
)
@pytest.mark.parametrize("dim", [-1, 1])
def test_split_gate_up_picks_the_rows_of_each_layout(layout, gate, up, dim):
    """J10"""
    rows = torch.arange(8).expand(2, 8) if dim == -1 else torch.arange(8)[None, :, None].expand(2, 8, 3)
    got_gate, got_up = split_gate_up(rows, layout, dim)
    at = (0,) if dim == -1 else (0, slice(None), 0)
    assert got_gate[at].tolist() == gate
    assert got_up[at].tolist() == up


def test_split_gate_up_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="gate_up_layout"):
        split_gate_up(torch.zeros(4), "gate-up")
    with pytest.raises(TypeError, match="gate_up_layout"):
        split_gate_up(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="even"):
        split_gate_up(torch.zeros(5), "gate_up")


def literal_preparation(rows):
    """rows [M, K] bf16: the shuffle and the cut as the specification words them, element by element."""
    num_rows, num_columns = rows.shape
    shuffled = torch.empty_like(rows)
    for block in range(0, num_rows, 32):
        for n in range(32):
            shuffled[block + n] = rows[block + 4 * (n % 8) + n // 8]
    cut = torch.empty(num_columns // 64, num_rows, 64, dtype=rows.dtype)
    for k in range(num_columns // 64):
        for m in range(num_rows):
            cut[k, m] = shuffled[m, 64 * k : 64 * k + 64]
    return cut


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_flashinfer_gate_up_is_the_literal_definition(layout):
    w13 = numbered(2, 64, 128, dtype=torch.bfloat16)
    prepared = to_flashinfer_gate_up(w13, layout)
    assert prepared.shape == (2, 2, 64, 64)
    assert prepared.is_contiguous()
    for expert in range(2):
        gate, up = split_gate_up(w13[expert], layout, dim=0)
        interleaved = torch.empty_like(w13[expert])
        for i in range(32):
            interleaved[2 * i] = up[i]
            interleaved[2 * i + 1] = gate[i]
        assert torch.equal(bits(prepared[expert]), bits(literal_preparation(interleaved)))


def test_flashinfer_down_is_the_literal_definition():
    w2 = numbered(2, 96, 128, dtype=torch.bfloat16)
    prepared = to_flashinfer_down(w2)
    assert prepared.shape == (2, 2, 96, 64)
    assert prepared.is_contiguous()
    for expert in range(2):
        assert torch.equal(bits(prepared[expert]), bits(literal_preparation(w2[expert])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_flashinfer_gate_up_round_trip(layout, dtype):
    w13 = numbered(2, 64, 128, dtype=dtype)
    assert torch.equal(bits(from_flashinfer_gate_up(to_flashinfer_gate_up(w13, layout), layout)), bits(w13))


def test_flashinfer_gate_up_changes_layout_on_the_way():
    w13 = numbered(2, 64, 128)
    gate, up = split_gate_up(w13, "gate_up", dim=1)
    other = from_flashinfer_gate_up(to_flashinfer_gate_up(w13, "gate_up"), "interleaved")
    assert torch.equal(other[:, 0::2], gate)
    assert torch.equal(other[:, 1::2], up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flashinfer_down_round_trip(dtype):
    w2 = numbered(2, 64, 192, dtype=dtype)
    assert torch.equal(bits(from_flashinfer_down(to_flashinfer_down(w2))), bits(w2))


def test_flashinfer_conversions_take_one_expert_alone():
    w13, w2 = numbered(64, 128), numbered(64, 128)
    assert torch.equal(to_flashinfer_gate_up(w13), to_flashinfer_gate_up(w13[None])[0])
    assert torch.equal(to_flashinfer_down(w2), to_flashinfer_down(w2[None])[0])
    assert torch.equal(from_flashinfer_down(to_flashinfer_down(w2)), w2)


@pytest.mark.parametrize(
    ("convert", "shape", "name"),
    [
        (to_flashinfer_gate_up, (2, 48, 128), "w13"),
        (to_flashinfer_gate_up, (2, 64, 100), "w13"),
        (to_flashinfer_down, (2, 48, 128), "w2"),
        (to_flashinfer_down, (2, 64, 100), "w2"),
        (to_flashinfer_down, (64,), "weight"),
        (from_flashinfer_gate_up, (2, 2, 64, 128), "weights"),
        (from_flashinfer_gate_up, (2, 2, 48, 32), "weights"),
        (from_flashinfer_down, (64, 32), "weights"),
    ],
)
def test_flashinfer_conversions_refuse_shapes_that_do_not_fit(convert, shape, name):
    with pytest.raises(ValueError, match=name):
        convert(torch.zeros(shape))
