"""Turns the ops' RuntimeErrors into the TypeErrors and ValueErrors that Python callers expect, with the same words."""

import re
from collections.abc import Callable
from typing import Any

import torch

# How the compiled code marks its argument errors (csrc/common/checks.h).
TYPE_ERROR, VALUE_ERROR = "moelora type error: ", "moelora value error: "
# How torch's dispatcher refuses a Python type that the schema has no use for.
_WRONG_TYPE = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'")
_KINDS = {TYPE_ERROR: TypeError, VALUE_ERROR: ValueError}


def call(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs `op`; its argument errors come out as TypeError or ValueError."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        text = str(error)
        for prefix, kind in _KINDS.items():
            if text.startswith(prefix):
                raise kind(text.removeprefix(prefix).split("\n")[0]) from None
        if wrong_type := _WRONG_TYPE.search(text):
            expected, name, got = wrong_type.groups()
            raise TypeError(f"{name}: expected {expected}, got {got}") from None
        raise


def require_tensor(value: Any, name: str, dims: int) -> None:
    """Checks what shape arithmetic in Python relies on, before any allocation."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dims, got shape {list(value.shape)}")


def require_positive(**sizes: int) -> None:
    """Checks the sizes that shape arithmetic in Python divides by or allocates with."""
    for name, size in sizes.items():
        if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name}: expected 1 or more, got {size}")


def require_inference(**tensors: torch.Tensor | None) -> None:
    """Refuses inputs that require grad while grad mode is on.

    The ops have no backward: such an input would lose its gradient silently.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: requires grad, but moelora is for inference only; "
                "call it under torch.inference_mode() or detach the tensor"
            )


def choice(value: str, names: dict[str, int], argument: str) -> int:
    """The int code of a named option."""
    if not isinstance(value, str):
        raise TypeError(f"{argument}: expected a str, got {type(value).__name__}")
    if value not in names:
        raise ValueError(f"{argument}: expected one of {', '.join(map(repr, names))}, got {value!r}")
    return names[value]
