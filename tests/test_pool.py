"""AdapterPool on the CPU, and its example."""

import importlib.util
from pathlib import Path

import pytest
import torch
from pool_cases import *  # noqa: F403

from moelora.pool import AdapterPool


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture
def example():
    path = Path(__file__).resolve().parent.parent / "examples" / "adapter_pool.py"
    spec = importlib.util.spec_from_file_location("examples_adapter_pool", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs(example, capsys):
    assert example.main([]) == 0
    assert "ok: every row matches" in capsys.readouterr().out


def test_the_example_notices_a_mixed_up_slot(example, capsys, monkeypatch):
    adapter_ids = AdapterPool.adapter_ids
    monkeypatch.setattr(AdapterPool, "adapter_ids", lambda pool, names: adapter_ids(pool, names).clamp(max=0))
    assert example.main([]) == 1
    assert "WRONG" in capsys.readouterr().out
