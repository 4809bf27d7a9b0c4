"""Build driver: finds torch, nvcc and CUTLASS, runs cmake with ninja, and records what was built.

Environment: TORCH_CUDA_ARCH_LIST (default "9.0a;10.0a;10.3a"), MOELORA_CUDA (0: CPU only; 1: nvcc is required),
MOELORA_CUTLASS_DIR (a CUTLASS checkout), MAX_JOBS (parallel compilations), MOELORA_PREBUILT_DIR (a folder with
libmoelora.so and _build_info.json of an earlier build: only moelora._C is compiled, for another Python version, and
torch is not needed).
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "moelora"
DEFAULT_ARCHS = "9.0a;10.0a;10.3a"
GIB_PER_JOB = 6  # one nvcc on a CUTLASS collective takes up to 5.3 GiB

sys.path.insert(0, str(PACKAGE))
from _source_hash import source_hash  # noqa: E402  (shared with the check that a library is not stale)

RELEASE = re.search(r'__version__ = "(.+)"', (PACKAGE / "_version.py").read_text()).group(1)


def package_dir(name: str, hint: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"moelora: {name} is needed to build; {hint}")
    return Path(next(iter(spec.submodule_search_locations)))


def torch_dir() -> Path:
    folder = package_dir("torch", "pip install 'torch>=2.11' (and build with --no-build-isolation)")
    version = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
    if (int(version.group(1)), int(version.group(2))) < (2, 11):
        sys.exit(f"moelora: torch {version.group(0)[15:]} is too old, 2.11 or newer is needed")
    return folder


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def wanted_nvcc() -> str | None:
    """The nvcc to build with, or None for a CPU-only build."""
    choice = os.environ.get("MOELORA_CUDA", "")
    if choice == "0":
        print("moelora: MOELORA_CUDA=0, building CPU-only")
        return None
    nvcc = find_nvcc()
    if nvcc is None and choice == "1":
        sys.exit("moelora: MOELORA_CUDA=1 but no nvcc on PATH or under CUDA_HOME")
    if nvcc is None:
        print("moelora: no nvcc found, building CPU-only")
    return nvcc


def cuda_version(nvcc: str) -> str:
    return re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "--version"], text=True)).group(1)


def wanted_archs() -> list[str]:
    """Of TORCH_CUDA_ARCH_LIST, whatever separates them; cmake refuses those that there are no kernels for."""
    return [arch for arch in re.split(r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHS)) if arch]


def prebuilt_info() -> dict | None:
    """What is known of the ops library in MOELORA_PREBUILT_DIR, which must be of these very sources."""
    folder = os.environ.get("MOELORA_PREBUILT_DIR")
    if not folder:
        return None
    path = Path(folder) / "_build_info.json"
    if not path.exists() or not path.with_name("libmoelora.so").exists():
        sys.exit(f"moelora: no _build_info.json and libmoelora.so in MOELORA_PREBUILT_DIR={folder}")
    info = json.loads(path.read_text())
    if info["source_hash"] != source_hash(ROOT):
        sys.exit(f"moelora: the library in MOELORA_PREBUILT_DIR={folder} was built from other sources than these")
    return info


def run_cmake(arguments: list[str]) -> None:
    # cmake and the compilers have said what is wrong; a traceback of this script would only hide it.
    if subprocess.run(["cmake", *arguments]).returncode != 0:
        sys.exit("moelora: the build failed, the reason is above")


def version() -> str:
    """The release, with what it was built for as PEP 440's local version: +cu130, or +cpu. An sdist is for all."""
    if "sdist" in sys.argv:
        return RELEASE
    prebuilt = prebuilt_info()
    nvcc = None if prebuilt else wanted_nvcc()
    cuda = prebuilt["cuda"] if prebuilt else cuda_version(nvcc) if nvcc else None
    return f"{RELEASE}+cu{cuda.replace('.', '')}" if cuda else f"{RELEASE}+cpu"


def default_jobs() -> int:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory_gib // GIB_PER_JOB)))


class CMakeBuild(build_ext):
    """Builds libmoelora.so and moelora._C in one cmake run."""

    def output_dir(self) -> Path:
        # An editable install imports from the source tree, so the artefacts belong there.
        in_tree = self.inplace or self.editable_mode
        return PACKAGE if in_tree else Path(self.build_lib).resolve() / "moelora"

    def get_outputs(self):
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return [str(self.output_dir() / name) for name in ("libmoelora.so", f"_C{suffix}", "_build_info.json")]

    def get_output_mapping(self):
        return {}

    def run(self):
        output = self.output_dir()
        prebuilt = prebuilt_info()
        # A folder for each Python: what cmake finds of one must not be used for another.
        build = ROOT / "build" / (f"cmake_module_{sys.implementation.cache_tag}" if prebuilt else "cmake")
        nvcc = None if prebuilt else wanted_nvcc()
        archs = wanted_archs()
        torch = None if prebuilt else torch_dir()
        output.mkdir(parents=True, exist_ok=True)
        configure = [
            "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DMOELORA_OUTPUT_DIR={output}", f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DMOELORA_OPS_LIBRARY={'OFF' if prebuilt else 'ON'}", f"-DMOELORA_CUDA={'ON' if nvcc else 'OFF'}",
        ]  # fmt: skip
        if torch:
            configure.append(f"-DMOELORA_TORCH_DIR={torch}")
        if nvcc:
            configure += [f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DMOELORA_ARCHS={';'.join(archs)}"]
            if "MOELORA_CUTLASS_DIR" not in os.environ:
                hint = "pip install nvidia-cutlass==4.2.0, or set MOELORA_CUTLASS_DIR to a checkout"
                configure.append(f"-DMOELORA_CUTLASS_PACKAGE_DIR={package_dir('cutlass_library', hint)}")
        built_from = source_hash(ROOT)
        run_cmake(configure)
        jobs = os.environ.get("MAX_JOBS") or default_jobs()
        run_cmake(["--build", str(build), "-j", str(jobs)])
        if prebuilt:
            for name in ("libmoelora.so", "_build_info.json"):
                shutil.copy2(Path(os.environ["MOELORA_PREBUILT_DIR"]) / name, output / name)
        else:
            self.write_build_info(output, build, torch, nvcc, archs, built_from)

    def write_build_info(self, output, build, torch, nvcc, archs, built_from):
        cuda = cutlass = None
        if nvcc:
            cuda = cuda_version(nvcc)
            cutlass = (build / "cutlass_version.txt").read_text()
        info = {
            "version": RELEASE,
            "cuda": cuda,
            "archs": archs if nvcc else [],
            "cutlass": cutlass,
            "built_with_torch": re.search(r"__version__ = '(.+)'", (torch / "version.py").read_text()).group(1),
            "source_hash": built_from,
            "library_sha256": hashlib.sha256((output / "libmoelora.so").read_bytes()).hexdigest(),
        }
        (output / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")


setup(
    version=version(),
    packages=find_packages(include=["moelora*"]),
    package_data={"moelora": ["py.typed"]},
    ext_modules=[Extension("moelora._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
