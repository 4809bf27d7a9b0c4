"""moe_sort on the CPU."""

import pytest
from moe_sort_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
