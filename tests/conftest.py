"""Makes the modules beside the tests importable from tests/gpu too, and sets what holds for every test."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The tests of an op live in <op>_cases.py and are imported by the files that name a device.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*_cases.py")))

# The shapes are small and pytest-xdist uses the cores: more threads only wait for each other.
torch.set_num_threads(1)

# Runs share machines, so no deadline. In CI every run tries the same examples.
settings.register_profile("moelora", deadline=None, max_examples=50, derandomize=bool(os.environ.get("CI")))
settings.load_profile("moelora")
