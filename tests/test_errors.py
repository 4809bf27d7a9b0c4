"""Bad input on the CPU, and that the checks do not vanish."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from error_cases import *  # noqa: F403

import moelora


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module", params=[torch.bfloat16], ids=["bf16"])
def dtype(request):
    return request.param


def test_no_check_of_the_package_is_an_assert():
    """K12"""
    package = Path(moelora.__file__).resolve().parent
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


BAD_CALLS = """
import torch, moelora
x, w13, w2 = torch.zeros(3, 64), torch.zeros(4, 64, 64), torch.zeros(4, 64, 32)
weights, ids = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
bad = [(x, w13, w2[:, :, :24].contiguous(), weights, ids), (x, w13[:, :-1], w2, weights, ids),
       (x, w13, w2, weights[:, :1], ids), (x[0], w13, w2, weights, ids), (x, w13[:3], w2, weights, ids)]
for arguments in bad:
    try:
        moelora.fused_moe_lora(*arguments)
    except ValueError as error:
        print(str(error).split(":")[0])
"""


def test_checks_hold_under_python_o():
    """K12"""
    result = subprocess.run([sys.executable, "-O", "-c", BAD_CALLS], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["w2", "w13", "topk_weights", "hidden_states", "w2"]
