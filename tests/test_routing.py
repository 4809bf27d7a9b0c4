"""routing on the CPU."""

import pytest
from routing_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
