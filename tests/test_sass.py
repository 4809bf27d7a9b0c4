"""The machine code in the library: every GPU arch that was asked for, with that generation's tensor-core instructions.

Reads what cuobjdump (with nvdisasm: both on PATH, or PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) prints
of the built library. On CI (CI=true) a build or a tool that is missing is a failure, elsewhere the reason to skip.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from moelora import build_info
from moelora._load import LIBRARY

# wgmma (HGMMA) and tensor-memory (UTCHMMA, LDTM) code with TMA loads, or warp-wide mma of any generation (HMMA).
SM90 = {"HGMMA", "UTMALDG"}
SM100 = {"UTCHMMA", "LDTM", "UTMALDG"}
PORTABLE = {"HMMA"}
TENSOR_CORE_KERNELS = {
    "grouped_gemm_kernel": {"sm_90a": SM90, "sm_100a": SM100, "sm_103a": SM100},
    "prefill_gemm_kernel": {"sm_90a": SM90},
    "prefill_shrink_kernel": {"sm_90a": {"HGMMA"}},
    "fused_decode_kernel": dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), PORTABLE | {"UTMALDG"}),
    "lora_shrink_grouped_kernel": dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), PORTABLE),
    "lora_expand_grouped_kernel": dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), PORTABLE),
}
MMA = {"HGMMA", "UTCHMMA", "HMMA"}
# Made for one generation (files named _sm90 or _sm100); every other kernel is the same source on every arch.
OF_ONE_GENERATION = {"grouped_gemm_kernel", "prefill_gemm_kernel", "prefill_shrink_kernel", "prefill_tiles_kernel"}

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
_KERNEL_NAME = re.compile(r"\d([a-z][a-z_]*_kernel)")


def missing(reason: str):
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def tool_folder() -> str | None:
    """The folder that holds cuobjdump and nvdisasm."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    nvidia = importlib.util.find_spec("nvidia")
    if nvidia is not None:
        folders += [str(folder) for root in nvidia.submodule_search_locations for folder in Path(root).glob("*/bin")]
    for folder in folders:
        if all(shutil.which(tool, path=folder) for tool in ("cuobjdump", "nvdisasm")):
            return folder
    return None


def parse_sass(text: str) -> dict[str, dict[str, Counter]]:
    """arch -> mangled kernel name -> how often each instruction occurs, from `cuobjdump --dump-sass`."""
    code: dict[str, dict[str, Counter]] = defaultdict(dict)
    arch = counts = None
    for line in text.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ").strip()
        elif "Function : " in line:
            counts = code[arch].setdefault(line.split("Function : ")[1].strip(), Counter())
        elif counts is not None and (match := _INSTRUCTION.match(line)):
            counts[match.group(1)] += 1
    return code


def kernel_name(mangled: str) -> str:
    match = _KERNEL_NAME.search(mangled)
    return match.group(1) if match else mangled


@pytest.fixture(scope="module")
def sass() -> dict[str, dict[str, Counter]]:
    if not build_info()["archs"]:
        missing("this build is CPU-only")
    folder = tool_folder()
    if folder is None:
        missing("cuobjdump and nvdisasm not found (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    environment = os.environ | {"PATH": folder + os.pathsep + os.environ["PATH"]}
    dump = subprocess.run(
        ["cuobjdump", "--dump-sass", str(LIBRARY)], env=environment, capture_output=True, text=True, check=True
    )
    return parse_sass(dump.stdout)


def test_machine_code_for_every_arch_asked_for(sass):
    assert set(sass) == {"sm_" + arch.replace(".", "") for arch in build_info()["archs"]}


def test_every_kernel_exists_on_every_arch(sass):
    portable = {
        arch: {mangled for mangled in kernels if kernel_name(mangled) not in OF_ONE_GENERATION}
        for arch, kernels in sass.items()
    }
    first = next(iter(portable.values()))
    assert {kernel_name(mangled) for mangled in first} >= {"permute_kernel", "finalize_kernel"}
    for arch, names in portable.items():
        assert names == first, arch


def test_tensor_core_kernels_use_their_generations_instructions(sass):
    for arch, kernels in sass.items():
        found = defaultdict(list)
        for mangled, counts in kernels.items():
            found[kernel_name(mangled)].append(counts)
        for name, expected in TENSOR_CORE_KERNELS.items():
            if arch not in expected:
                continue
            assert found[name], f"{arch}: no {name}"
            for counts in found[name]:
                assert expected[arch] <= set(counts), f"{arch} {name}: only {sorted(counts)}"


def test_every_kernel_on_tensor_cores_is_listed_here(sass):
    on_tensor_cores = {
        kernel_name(mangled) for kernels in sass.values() for mangled, counts in kernels.items() if MMA & set(counts)
    }
    assert on_tensor_cores <= set(TENSOR_CORE_KERNELS)


def test_as_many_gemm_configs_on_every_arch(sass):
    configs = {
        arch: sum(kernel_name(mangled) == "grouped_gemm_kernel" for mangled in kernels)
        for arch, kernels in sass.items()
    }
    assert len(set(configs.values())) == 1, configs


def test_parser_reads_what_cuobjdump_prints():
    text = """
arch = sm_90a
\t\tFunction : _ZN7moelora19grouped_gemm_kernelIfEEvv
        /*2600*/                   HGMMA.64x16x16.F32.BF16 R32, gdesc[UR16], RZ, !UPT ;    /* 0x00200000102079f0 */
        /*2640*/              @!UP0 UTMALDG.3D [UR8], [UR4] ;  /* 0x00 */
                                                               /* 0x000fe200078e00ff */
        /*12640*/             @P1 HGMMA.64x16x16.F32.BF16 R24, gdesc[UR16], R32 ;  /* 0x00 */
arch = sm_100a
\t\tFunction : _ZN7moelora14permute_kernelEv
        /*0000*/                   LDC R1, c[0x0][0x37c] ;  /* 0x00 */
"""
    code = parse_sass(text)
    assert code["sm_90a"]["_ZN7moelora19grouped_gemm_kernelIfEEvv"] == Counter(HGMMA=2, UTMALDG=1)
    assert code["sm_100a"]["_ZN7moelora14permute_kernelEv"] == Counter(LDC=1)
    assert kernel_name("_ZN7moelora12fused_decode19fused_decode_kernelILi1E") == "fused_decode_kernel"
