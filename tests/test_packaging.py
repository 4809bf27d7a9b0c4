"""The build stops with one clear line where something is missing, and the wheel in dist/ is what its name says.

The refusals are those of setup.py and of the cmake files, run by themselves. On CI (CI=true) a tool or a wheel that is
missing is a failure, elsewhere the reason to skip.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

import moelora

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def missing(reason: str):
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def tool(name: str) -> str:
    folders = [os.environ["PATH"], str(Path(sys.executable).parent), "/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(folders)) or missing(f"{name} not found")


def squeezed(text: str) -> str:
    return " ".join(text.split())


# ---- what cmake refuses ----


@pytest.fixture
def cmake_file(tmp_path):
    """Runs one file of third_party/ by itself."""

    def run(name: str, *definitions: str, **environment: str) -> subprocess.CompletedProcess:
        script = tmp_path / "script.cmake"
        script.write_text(f'cmake_minimum_required(VERSION 3.25)\ninclude("{ROOT}/third_party/{name}")\n')
        command = [tool("cmake"), *(f"-D{definition}" for definition in definitions), "-P", str(script)]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)

    return run


@pytest.fixture
def arch_list(cmake_file):
    compiler = (f"CMAKE_CUDA_COMPILER={tool('nvcc')}", "CMAKE_CUDA_COMPILER_VERSION=13.0")
    return lambda archs: cmake_file("cuda_archs.cmake", *compiler, f"MOELORA_ARCHS={archs}")


@pytest.mark.parametrize("archs", ["9.0a", "10.0a;10.3a", "9.0a 10.3a", "9.0a,10.0a"])
def test_arch_lists_that_are_taken(arch_list, archs):
    done = arch_list(archs)
    assert done.returncode == 0, done.stderr
    assert f"GPU archs {re.sub('[, ]', ';', archs)}" in done.stdout


@pytest.mark.parametrize("arch", ["8.0", "9.0", "9.0a+PTX", "10.0f", "12.0a", "Hopper"])
def test_arch_without_kernels_stops_the_build(arch_list, arch):
    """I03, I05: no wheel that lacks an arch which was asked for, whatever other archs are with it."""
    done = arch_list(f"9.0a;{arch}")
    assert done.returncode != 0
    message = squeezed(done.stderr)
    assert f"TORCH_CUDA_ARCH_LIST names '{arch}', for which there are no kernels" in message
    assert "known: 9.0a;10.0a;10.3a" in message


def test_empty_arch_list_stops_the_build(arch_list):
    done = arch_list("")
    assert done.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST is empty" in done.stderr


def test_missing_cutlass_stops_the_build(cmake_file, tmp_path):
    """I08: the folder that was looked in, and the variable to set."""
    done = cmake_file("cutlass.cmake", MOELORA_CUTLASS_DIR=str(tmp_path))
    assert done.returncode != 0
    message = squeezed(done.stderr)
    assert f"no CUTLASS headers in '{tmp_path}/include'" in message
    assert "set MOELORA_CUTLASS_DIR to a checkout" in message


def test_old_cutlass_stops_the_build(cmake_file, tmp_path):
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 2\n")
    done = cmake_file("cutlass.cmake", MOELORA_CUTLASS_DIR=str(tmp_path))
    assert done.returncode != 0
    assert f"CUTLASS 3.9.2 (MOELORA_CUTLASS_DIR={tmp_path}) is too old, 4.2 is needed" in squeezed(done.stderr)


# ---- what setup.py refuses, and the version it gives ----


@pytest.fixture
def setup_py(tmp_path):
    """Runs setup.py with packages and tools that are made up; `environment` has nothing of the real build's."""
    pytest.importorskip("setuptools")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MOELORA_", "TORCH_", "CUDA_"))}
        return subprocess.run(
            [sys.executable, "setup.py", *arguments],
            cwd=ROOT,
            env=kept | {"PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "PATH": str(tmp_path)} | environment,
            capture_output=True,
            text=True,
        )

    def build(**environment: str) -> str:
        done = run("build_ext", "--build-lib", str(tmp_path / "out"), **environment)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr.strip().splitlines()[-1]

    run.build = build
    return run


@pytest.fixture
def nvcc_13_0(tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    compiler.chmod(0o755)


def fake_torch(folder: Path, version: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")


def test_missing_torch_stops_the_build(setup_py, tmp_path):
    """I09: an environment without torch, the isolated one of pip among them."""
    (tmp_path / "torch.py").touch()  # hides the real one
    message = setup_py.build(MOELORA_CUDA="0")
    assert message == (
        "moelora: torch is needed to build; pip install 'torch>=2.11' (and build with --no-build-isolation)"
    )


def test_old_torch_stops_the_build(setup_py, tmp_path):
    fake_torch(tmp_path, "2.10.1+cu128")
    assert setup_py.build(MOELORA_CUDA="0") == "moelora: torch 2.10 is too old, 2.11 or newer is needed"


def test_missing_cutlass_package_stops_the_build(setup_py, nvcc_13_0, tmp_path):
    """I08."""
    fake_torch(tmp_path, "2.13.0+cpu")
    (tmp_path / "cutlass_library.py").touch()
    message = setup_py.build()
    assert message.startswith("moelora: cutlass_library is needed to build; pip install nvidia-cutlass==")
    assert "MOELORA_CUTLASS_DIR" in message


def test_cuda_build_without_nvcc_stops(setup_py):
    assert setup_py.build(MOELORA_CUDA="1") == "moelora: MOELORA_CUDA=1 but no nvcc on PATH or under CUDA_HOME"


def test_prebuilt_library_that_is_not_there_stops_the_build(setup_py, tmp_path):
    message = setup_py.build(MOELORA_PREBUILT_DIR=str(tmp_path))
    assert message == f"moelora: no _build_info.json and libmoelora.so in MOELORA_PREBUILT_DIR={tmp_path}"


def test_prebuilt_library_of_other_sources_stops_the_build(setup_py, tmp_path):
    (tmp_path / "libmoelora.so").touch()
    (tmp_path / "_build_info.json").write_text(json.dumps({"cuda": "13.0", "source_hash": "another"}))
    assert "was built from other sources than these" in setup_py.build(MOELORA_PREBUILT_DIR=str(tmp_path))


def test_version_says_what_it_was_built_for(setup_py, nvcc_13_0):
    def version(*arguments: str, **environment: str) -> str:
        done = setup_py(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    assert version("--version") == f"{moelora.__version__}+cu130"
    assert version("--version", MOELORA_CUDA="0") == f"{moelora.__version__}+cpu"
    assert version("--version", "sdist") == moelora.__version__


# ---- the wheel in dist/ (make wheel) ----


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = sorted(DIST.glob("moelora-*.whl"), key=lambda path: path.stat().st_mtime)
    return wheels[-1] if wheels else missing("no wheel in dist/ (make wheel)")


def read(wheel: Path, name: str) -> bytes:
    """The file in the wheel whose path ends with `name`."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(name)]
        return archive.read(path)


def test_wheel_is_named_by_the_rules(wheel):
    """I10: PEP 440's local version says CUDA or CPU; the tag is auditwheel's, for the Python that built it."""
    name, version, _, tags = parse_wheel_filename(wheel.name)
    info = json.loads(read(wheel, "_build_info.json"))
    assert (name, version.public) == ("moelora", moelora.__version__)
    assert version.local == ("cu" + info["cuda"].replace(".", "") if info["cuda"] else "cpu")
    for tag in tags:
        assert re.fullmatch(r"cp3\d+", tag.interpreter)
        assert tag.abi == tag.interpreter
        assert re.fullmatch(r"manylinux_2_\d+_\w+", tag.platform)


def test_wheel_bundles_nothing_of_torch_or_cuda(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"moelora"}
    libraries = sorted(Path(name).name.split(".")[0] for name in names if ".so" in name)
    assert libraries == ["_C", "libmoelora"]


def test_wheel_needs_no_cuda_library(wheel, tmp_path):
    """I13: no libcuda and no libcudart, so it loads without a driver and beside a CPU-only torch; no RPATH either."""
    library = tmp_path / "libmoelora.so"
    library.write_bytes(read(wheel, "libmoelora.so"))
    entries = subprocess.run([tool("readelf"), "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", entries))
    system = {"libc", "libm", "libdl", "librt", "libpthread", "libgcc_s", "libstdc++", "ld-linux-x86-64"}
    assert {name.split(".so")[0] for name in needed} - system == {"libtorch", "libtorch_cpu"}
    assert "PATH)" not in entries


def test_wheel_holds_the_library_that_its_build_info_tells_of(wheel):
    info = json.loads(read(wheel, "_build_info.json"))
    assert hashlib.sha256(read(wheel, "libmoelora.so")).hexdigest() == info["library_sha256"]


def test_wheel_does_not_replace_the_users_torch(wheel):
    """I11, I15: any torch from 2.11 on will do, and nothing of NVIDIA's is asked for."""
    metadata = Parser().parsestr(read(wheel, ".dist-info/METADATA").decode())
    requirements = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(requirements) == ["numpy", "safetensors>=0.5", "torch>=2.11"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_wheel_is_under_100_mib(wheel):
    """I12."""
    assert wheel.stat().st_size < 100 * 2**20
