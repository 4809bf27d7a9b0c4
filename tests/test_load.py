"""Importing moelora where something does not fit: one line that says what, never an abort or an undefined symbol alone.

The imports happen in fresh interpreters, some on a copy of the package that was damaged on purpose.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moelora
from moelora import _load

BUILT = moelora.build_info()


def python(*arguments: str, folder: Path = _load.PACKAGE.parent, **environment: str) -> subprocess.CompletedProcess:
    """Runs a fresh interpreter that finds moelora in `folder`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def last_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of the package, in a folder of its own."""
    return shutil.copytree(_load.PACKAGE, tmp_path / "moelora", ignore=shutil.ignore_patterns("__pycache__"))


def test_torch_before_2_11_is_refused_in_one_line():
    """I01: no undefined symbol, since the library is not even looked at."""
    done = python("-c", "import torch; torch.__version__ = '2.10.1+cu128'; import moelora")
    assert (
        last_line(done) == f"ImportError: moelora {moelora.__version__} needs torch >= 2.11, found torch 2.10.1+cu128"
    )
    assert "undefined symbol" not in done.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.15.0.dev20261101", "3.0.0a0+git1234567"])
def test_later_torch_is_taken(monkeypatch, version):
    """I15: the stable ABI promises that they work."""
    monkeypatch.setattr(torch, "__version__", version)
    _load.load_library()


@pytest.mark.parametrize(
    ("name", "other"),
    [(b"\0libtorch_cpu.so\0", b"\0lib_is_gone_.so\0"), (b"\0torch_library_impl\0", b"\0torch_library_gone\0")],
    ids=["a library is missing", "a symbol is missing"],
)
def test_library_that_does_not_load_names_both_versions_and_the_loaders_reason(copied, name, other):
    """I01, I02, I16: built with, found, and the original error, in the message and as the cause."""
    library = copied / "libmoelora.so"
    content = library.read_bytes()
    assert name in content and len(name) == len(other)
    library.write_bytes(content.replace(name, other))
    info = copied / "_build_info.json"
    info.write_text(json.dumps(BUILT | {"built_with_torch": "2.12.3+cu999"}))

    done = python("-c", "import moelora", folder=copied.parent)
    message = last_line(done)
    assert message.startswith(f"ImportError: moelora {moelora.__version__}: cannot load {library}")
    for part in ("built with torch 2.12.3+cu999", f"found torch {torch.__version__}", "gone"):
        assert part in message
    assert "direct cause of the following exception" in done.stderr


def test_package_that_was_never_built_says_how(copied):
    (copied / "_build_info.json").unlink()
    message = last_line(python("-c", "import moelora", folder=copied.parent))
    assert message.startswith("ImportError")
    assert "has not been built" in message
    assert "pip install -e ." in message


ONE_OP = """
import torch
assert moelora.ops.pack_topk(torch.ones(1, 1), torch.full((1, 1), 7)).item() == (7 << 16) | 0x3F80
"""


def test_second_copy_of_the_package_in_one_process(copied):
    """I14: the ops that are registered serve it too; registering them twice would abort."""
    code = f"""
import sys
import moelora
first = moelora.__file__
for name in [name for name in sys.modules if name.split(".")[0] == "moelora"]:
    del sys.modules[name]
sys.path.insert(0, {str(copied.parent)!r})
import moelora
assert moelora.__file__ != first
"""
    done = python("-c", code + ONE_OP)
    assert done.returncode == 0, done.stderr


def test_library_loaded_by_path_before_the_import():
    """I14."""
    code = f"import torch; torch.ops.load_library({str(_load.LIBRARY)!r}); import moelora"
    done = python("-c", code + ONE_OP)
    assert done.returncode == 0, done.stderr


def test_no_visible_gpu():
    """I13: imports, computes on the CPU, and says in one line why not on CUDA."""
    code = "import moelora; print(moelora.cuda_unavailable_reason())" + ONE_OP
    done = python("-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1
    assert done.stdout.strip() != "None"


WORKERS = """
import multiprocessing
import sys

import torch

import moelora


def forward(seed):
    torch.manual_seed(seed)
    x, w13, w2 = torch.randn(40, 64), torch.randn(4, 2 * 48, 64), torch.randn(4, 64, 48)
    weights, ids = moelora.route(torch.randn(40, 4), 2)
    return moelora.fused_moe_lora(x, w13, w2, weights, ids).tolist()


if __name__ == "__main__":
    expected = [forward(0), forward(1)]
    # One thread each, as torch's DataLoader does it: OpenMP's threads do not survive a fork.
    with multiprocessing.get_context(sys.argv[1]).Pool(2, torch.set_num_threads, [1]) as pool:
        assert pool.map_async(forward, [0, 1]).get(timeout=200) == expected
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes(tmp_path, start):
    """I14: workers compute the same bits; forked ones after their parent has computed."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    done = python(str(script), start)
    assert done.returncode == 0, done.stderr


class TestReasons:
    """What `cuda_unavailable_reason` says, on builds and machines that are made up."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        # Both functions keep their answers.
        for function in (_load.cuda_unavailable_reason, _load.unsupported_gpu):
            monkeypatch.setattr(_load, function.__name__, function.__wrapped__)

    def machine(self, monkeypatch, *, archs, torch_cuda="13.0", available=True, capability=(9, 0)):
        monkeypatch.setattr(_load, "build_info", lambda: BUILT | {"archs": archs})
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Made-up GPU")
        return _load.cuda_unavailable_reason()

    def test_none_where_the_kernels_run(self, monkeypatch):
        assert self.machine(monkeypatch, archs=["9.0a", "10.0a"]) is None

    @pytest.mark.parametrize(
        ("machine", "part"),
        [
            ({"archs": []}, "CPU-only (no nvcc at build time, or MOELORA_CUDA=0)"),
            ({"archs": ["9.0a"], "torch_cuda": None}, f"torch {torch.__version__} is a CPU-only build"),
            ({"archs": ["9.0a"], "available": False}, "no device, or no driver"),
        ],
    )
    def test_one_line(self, monkeypatch, machine, part):
        reason = self.machine(monkeypatch, **machine)
        assert part in reason
        assert "\n" not in reason

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3), (12, 0)])
    def test_gpu_whose_arch_was_not_built(self, monkeypatch, capability):
        """I03, I05: names the GPU's arch and those that were built; code for 10.0a does not run on 10.3."""
        reason = self.machine(monkeypatch, archs=["9.0a", "10.0a"], capability=capability)
        assert f"compute capability {capability[0]}.{capability[1]}" in reason
        assert "Made-up GPU" in reason
        assert "kernels for 9.0a, 10.0a only" in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("archs", "never_run"),
    [([], []), (["9.0a"], []), (["9.0a", "10.0a", "10.3a"], ["10.0a", "10.3a"]), (["10.3a"], ["10.3a"])],
)
def test_build_info_says_which_kernels_never_ran(monkeypatch, tmp_path, archs, never_run):
    recorded = {key: value for key, value in BUILT.items() if key != "never_run_on_hardware"} | {"archs": archs}
    (tmp_path / "_build_info.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(_load, "PACKAGE", tmp_path)
    assert _load.build_info.__wrapped__() == recorded | {"never_run_on_hardware": never_run}


def test_build_info_of_this_build():
    assert BUILT["version"] == moelora.__version__
    assert set(BUILT) >= {"cuda", "archs", "cutlass", "built_with_torch", "source_hash", "never_run_on_hardware"}
    assert bool(BUILT["archs"]) == (BUILT["cuda"] is not None)
