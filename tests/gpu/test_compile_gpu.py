"""Schemas, fake kernels, torch.compile and torch.export on the GPU: the tests of the CPU."""

from compile_cases import *  # noqa: F403
