"""GPU tests: skipped with the reason where none can run, refused where the library is not built from these sources."""

from pathlib import Path

import pytest
import torch

from moelora import build_info
from moelora._load import cuda_unavailable_reason
from moelora._source_hash import source_hash

ROOT = Path(__file__).resolve().parent.parent.parent


def library_is_current() -> bool:
    return build_info()["source_hash"] == source_hash(ROOT)


def pytest_report_header() -> str:
    reason = cuda_unavailable_reason()
    gpu = f"GPU tests skipped: {reason}" if reason else f"on {torch.cuda.get_device_name()}"
    state = "built from these sources" if library_is_current() else "NOT built from these sources"
    return f"moelora library: source hash {build_info()['source_hash'][:16]}, {state}; {gpu}"


@pytest.fixture(scope="session")
def device():
    reason = cuda_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    if not library_is_current():
        pytest.fail("moelora/libmoelora.so was not built from these sources; rebuild it")
    return "cuda"
