"""pack_topk and unpack_topk on the CPU."""

import pytest
from pack_topk_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
