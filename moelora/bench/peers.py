"""What the rows of other projects' layers share; they are in `peers_vllm` and `peers_sglang`.

A peer is imported on first use. What stops it (it is not installed, its interface is another one, it does not do what
is asked) becomes one line of the output; its results are checked against the oracle as everyone's are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor


class Refused(Exception):
    """Why a peer gives no row, in one line."""


FOREIGN = ("vllm", "sglang")


def missing(system: str) -> str | None:
    """Why `system` cannot run at all here, None where it can be tried."""
    if system not in FOREIGN:
        return None
    try:
        importlib.import_module(f"moelora.bench.peers_{system}").interface()
    except Refused as reason:
        return str(reason)
    return None


def one_line(error: Exception) -> str:
    """What to print of an exception that a peer ended with."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, Refused):
        return text
    return f"{type(error).__name__}: {text}"


@contextmanager
def refusing(package: str) -> Iterator[None]:
    """Turns what goes wrong inside `package` into a Refused that names the version."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise Refused("not installed") from None
        raise Refused(f"{package} {_version(package)}: {one_line(error)}") from error


def imported(modules: dict[str, str]) -> SimpleNamespace:
    """What is called of a package, by name; `modules` has the module of each."""
    return SimpleNamespace(**{name: getattr(importlib.import_module(module), name) for name, module in modules.items()})


def local_experts(num_experts: int, local: int, device: torch.device) -> Tensor:
    """int32 [num_experts]: the place of each expert of the model among the `local` first, -1 for those of others."""
    places = torch.arange(num_experts, dtype=torch.int32, device=device)
    return places.masked_fill_(places >= local, -1)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
