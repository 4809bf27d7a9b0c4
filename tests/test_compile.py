"""Schemas, fake kernels, torch.compile and torch.export on the CPU."""

import pytest
from compile_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
