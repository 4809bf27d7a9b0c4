"""The Hugging Face cases on the CPU, in fp32 (< 1e-5) and bf16 (< 1e-2)."""

import pytest
import torch
from hf_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param
