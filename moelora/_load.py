"""Finds and loads the compiled ops library, once; a failure says what was built and what was found."""

import json
from functools import cache
from pathlib import Path

import torch

from moelora._version import __version__

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "libmoelora.so"
MIN_TORCH = (2, 11)
# Archs whose kernels were compiled and read (SASS) but never run: no such GPU was at hand.
_NEVER_RUN = ("10.0a", "10.3a")


@cache
def build_info() -> dict:
    """What this installation holds: version, CUDA toolkit, GPU archs in the library, CUTLASS, the torch it was built
    with, a hash of its sources, and the archs whose kernels have never run on hardware. Empty lists and None where a
    build is CPU-only.

    Raises:
        ImportError: the package was never built.
    """
    path = PACKAGE / "_build_info.json"
    if not path.exists():
        raise ImportError(
            f"moelora {__version__} has not been built: {path} is missing. "
            "Run `pip install -e . --no-build-isolation` (or `make demo`) in the source folder."
        )
    info = json.loads(path.read_text())
    return info | {"never_run_on_hardware": [arch for arch in info["archs"] if arch in _NEVER_RUN]}


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def load_library() -> None:
    """Registers torch.ops.moelora.*; a second call, or a second copy of the package in one process, does nothing."""
    if torch_version() < MIN_TORCH:
        raise ImportError(
            f"moelora {__version__} needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}, found torch {torch.__version__}"
        )
    if hasattr(torch.ops.moelora, "moe_sort"):
        # Registering the namespace twice would abort the process.
        return
    info = build_info()
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        # torch may have wrapped the dynamic linker's own words.
        reason = error.__cause__ or error
        raise ImportError(
            f"moelora {__version__}: cannot load {LIBRARY}, built with torch {info['built_with_torch']} and CUDA "
            f"{info['cuda']} for {info['archs'] or 'CPU only'}; found torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}): {reason}"
        ) from error


@cache
def cuda_unavailable_reason() -> str | None:
    """One line on why the CUDA kernels cannot run here, or None where they can. Looks at the current device."""
    info = build_info()
    if not info["archs"]:
        return "this moelora build is CPU-only (no nvcc at build time, or MOELORA_CUDA=0)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU-only build"
    if not torch.cuda.is_available():
        return "torch sees no usable NVIDIA GPU (no device, or no driver)"
    return unsupported_gpu(torch.cuda.current_device())


@cache
def unsupported_gpu(device_index: int) -> str | None:
    """Why GPU `device_index` cannot run this build's kernels, or None. 'a' archs run on that very chip only."""
    major, minor = torch.cuda.get_device_capability(device_index)
    archs = build_info()["archs"]
    if f"{major}.{minor}a" in archs:
        return None
    return (
        f"GPU {device_index} ({torch.cuda.get_device_name(device_index)}) has compute capability {major}.{minor}, "
        f"and this moelora build holds kernels for {', '.join(archs) or 'no GPU'} only; "
        f'rebuild with TORCH_CUDA_ARCH_LIST="{major}.{minor}a" if moelora supports that GPU'
    )
