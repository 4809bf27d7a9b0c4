"""lora_shrink on the CPU."""

import pytest
import torch
from lora_shrink_cases import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param
