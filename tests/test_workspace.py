"""A bounded workspace on the CPU."""

import pytest
import torch
from workspace_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def dtype(request):
    return request.param
