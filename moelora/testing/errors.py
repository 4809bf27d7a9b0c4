"""How wrong a result is, measured against a float64 oracle; for tests, benchmarks and `moelora.check`.

A mean hides a wrong token, so everything that accepts or rejects looks at single rows.
"""

import torch
from torch import Tensor

# Largest relative error of a correct result, whole and of one row. Rounding to bf16 costs up to 2^-9 a step, of which a
# row sees a few: 0.004 is typical, 0.01 happens in narrow rows. A mix-up (another expert, adapter, half, weight) costs
# 0.1 or more on inputs of `moelora.testing.inputs`, where every term of the layer has about the same size.
BOUNDS = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
ROW_BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Where terms nearly cancel, the error is that of the terms: such a row may exceed the bound if PyTorch in the same
# dtype is not much better, or as far as it is smaller than the other rows; never so far that a mix-up could pass.
_TIMES_PLAIN, _TIMES_BOUND = 2.0, 2.5


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; inf for NaN, or where 0 is missed."""
    difference = (got.double() - expected.double()).norm()
    return _ratio(difference, expected.double().norm()).item()


def row_errors(got: Tensor, expected: Tensor) -> Tensor:
    """The relative error of every row, float64, over the last dim: [...] from [..., N].

    A row that should be 0 has error 0 where it is exactly that, else inf; a NaN counts as inf.
    """
    got, expected = got.double(), expected.double()
    return _ratio((got - expected).norm(dim=-1), expected.norm(dim=-1))


def _ratio(difference: Tensor, size: Tensor) -> Tensor:
    ratio = torch.where(difference == 0, 0.0, difference / size)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def bad_rows(got: Tensor, expected: Tensor, *, plain: Tensor | None = None, bound: float | None = None) -> Tensor:
    """Indices [n, dims - 1] of the rows of `got` that no correct computation would give.

    Args:
        got: the result, [..., N].
        expected: the oracle, the same shape, float64.
        plain: the result of plain PyTorch in `got`'s dtype, which may excuse a row whose terms cancel.
        bound: the largest error of a row; default that of `got`'s dtype in ROW_BOUNDS.
    """
    if got.shape != expected.shape:
        raise ValueError(f"got: expected shape {list(expected.shape)}, got {list(got.shape)}")
    bound = ROW_BOUNDS[got.dtype] if bound is None else bound
    errors = row_errors(got, expected)
    norms = expected.double().norm(dim=-1)
    allowed = bound * (norms.square().mean().sqrt() / norms).clamp(min=1.0)
    if plain is not None:
        allowed = torch.maximum(allowed, _TIMES_PLAIN * row_errors(plain, expected))
    allowed = allowed.clamp(max=_TIMES_BOUND * bound)
    return (errors > allowed).nonzero()


def check_close(got: Tensor, expected: Tensor, *, plain: Tensor | None = None, bound: float | None = None) -> None:
    """Raises AssertionError with the worst rows unless every row and the whole are within their bounds.

    Args:
        got, expected, plain: as in `bad_rows`.
        bound: the largest error of a row and of the whole; default those in ROW_BOUNDS and BOUNDS.
    """
    bad = bad_rows(got, expected, plain=plain, bound=bound)
    if bad.numel():
        errors = row_errors(got, expected)
        worst = sorted(((errors[tuple(row)].item(), row.tolist()) for row in bad), reverse=True)[:5]
        text = ", ".join(f"row {row}: {error:.2e}" for error, row in worst)
        raise AssertionError(f"{len(bad)} of {errors.numel()} rows are wrong (relative error): {text}")
    # The whole is one long row.
    total = BOUNDS[got.dtype] if bound is None else bound
    whole = None if plain is None else plain.reshape(1, -1)
    if bad_rows(got.reshape(1, -1), expected.reshape(1, -1), plain=whole, bound=total).numel():
        raise AssertionError(f"relative error {relative_error(got, expected):.2e}, though no row is over its bound")
