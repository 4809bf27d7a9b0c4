"""The Hugging Face cases on the GPU."""

import pytest
import torch
from hf_cases import *  # noqa: F403


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param
