"""Row orders of gate and up, and weights prepared for FlashInfer's TRT-LLM kernels, both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora._errors import choice
from moelora.ops import GATE_UP_LAYOUTS

_SHUFFLE_ROWS = 32
_BLOCK_BYTES = 128


def swap_gate_up(delta: Tensor) -> Tensor:
    """[..., 2*I] as [gate | up] to the same as [up | gate], or back, as a new tensor.

    FlashInfer and vLLM's TRT-LLM classes have the up half first in a gate_up adapter delta.

    Raises:
        ValueError: an odd last dim.
    """
    if delta.dim() == 0 or delta.shape[-1] % 2:
        raise ValueError(f"delta: expected an even last dim, got shape {list(delta.shape)}")
    first, second = delta.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def split_gate_up(tensor: Tensor, gate_up_layout: str, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up entries of a dim of size 2*I in w13's row order.

    Raises:
        TypeError: a layout that is no str.
        ValueError: an unknown layout, or a dim of odd size.
    """
    choice(gate_up_layout, GATE_UP_LAYOUTS, "gate_up_layout")
    if tensor.shape[dim] % 2:
        raise ValueError(f"dim {dim}: expected an even size, got shape {list(tensor.shape)}")
    if gate_up_layout == "interleaved":
        pairs = tensor.unflatten(dim, (-1, 2))
        axis = dim if dim < 0 else dim + 1
        return pairs.select(axis, 0), pairs.select(axis, 1)
    first, second = tensor.chunk(2, dim=dim)
    return (first, second) if gate_up_layout == "gate_up" else (second, first)


def to_flashinfer_gate_up(w13: Tensor, gate_up_layout: str = "gate_up") -> Tensor:
    """w13 [E, 2*I, H] to gemm1's weights [E, H/b, 2*I, b] for FlashInfer's TRT-LLM kernels, a copy.

    Rows are interleaved (even: up, odd: gate), shuffled in blocks of 32, and K is cut in blocks of 128
    bytes (b = 64 for bf16). One expert's matrix, without the E, works as well.

    Raises:
        ValueError: 2*I that is no multiple of 32, H that is no multiple of b, an unknown layout.
    """
    gate_rows, up_rows = split_gate_up(_row_numbers(w13), gate_up_layout)
    return _prepared("w13", w13, torch.stack((up_rows, gate_rows), dim=1).flatten())


def from_flashinfer_gate_up(weights: Tensor, gate_up_layout: str = "gate_up") -> Tensor:
    """gemm1's weights [E, H/b, 2*I, b] back to w13 [E, 2*I, H] in the given layout, a copy.

    Raises:
        ValueError: a shape that `to_flashinfer_gate_up` does not give, an unknown layout.
    """
    interleaved = _canonical("weights", weights)
    w13 = torch.empty_like(interleaved)
    gate, up = split_gate_up(w13, gate_up_layout, dim=-2)
    gate.copy_(interleaved[..., 1::2, :])
    up.copy_(interleaved[..., 0::2, :])
    return w13


def to_flashinfer_down(w2: Tensor) -> Tensor:
    """w2 [E, H, I] to gemm2's weights [E, I/b, H, b] for FlashInfer's TRT-LLM kernels, a copy.

    Rows are shuffled in blocks of 32 and K is cut in blocks of 128 bytes (b = 64 for bf16). One expert's
    matrix, without the E, works as well.

    Raises:
        ValueError: H that is no multiple of 32, I that is no multiple of b.
    """
    return _prepared("w2", w2, _row_numbers(w2))


def from_flashinfer_down(weights: Tensor) -> Tensor:
    """gemm2's weights [E, I/b, H, b] back to w2 [E, H, I], a copy.

    Raises:
        ValueError: a shape that `to_flashinfer_down` does not give.
    """
    return _canonical("weights", weights)


def _prepared(name: str, weight: Tensor, row_order: Tensor) -> Tensor:
    """weight [..., M, K] with its rows first put into row_order, shuffled and cut: [..., K/b, M, b]."""
    block = _BLOCK_BYTES // weight.element_size()
    rows, columns = weight.shape[-2:]
    if rows % _SHUFFLE_ROWS or columns % block:
        raise ValueError(
            f"{name}: expected rows in multiples of {_SHUFFLE_ROWS} and columns in multiples of "
            f"{block}, got shape {list(weight.shape)}"
        )
    shuffled = weight.index_select(-2, row_order[_shuffle(rows, weight.device)])
    return shuffled.unflatten(-1, (-1, block)).transpose(-3, -2).contiguous()


def _canonical(name: str, weights: Tensor) -> Tensor:
    """[..., K/b, M, b] back to [..., M, K], rows still in the order they had before the shuffle."""
    block = _BLOCK_BYTES // weights.element_size()
    if weights.dim() < 3 or weights.shape[-1] != block or weights.shape[-2] % _SHUFFLE_ROWS:
        raise ValueError(
            f"{name}: expected shape [..., K/{block}, M, {block}] with M a multiple of "
            f"{_SHUFFLE_ROWS}, got {list(weights.shape)}"
        )
    inverse = _shuffle(weights.shape[-2], weights.device).argsort()
    return weights.index_select(-2, inverse).transpose(-3, -2).flatten(-2)


def _row_numbers(weight: Tensor) -> Tensor:
    if weight.dim() < 2:
        raise ValueError(f"weight: expected at least 2 dims, got shape {list(weight.shape)}")
    return torch.arange(weight.shape[-2], device=weight.device)


def _shuffle(rows: int, device: torch.device) -> Tensor:
    """For every new row the old row it takes: in each block of 32, new n takes old 4 * (n % 8) + n // 8."""
    row = torch.arange(rows, device=device)
    n = row % _SHUFFLE_ROWS
    return row - n + 4 * (n % 8) + n // 8
