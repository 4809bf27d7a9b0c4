#!/usr/bin/env bash
# Makes the virtual environment VENV able to build, run and test moelora, and builds it unless an up-to-date build is there.
# Builds for the GPUs of this machine, CPU-only where there is none; TORCH_CUDA_ARCH_LIST or MOELORA_CUDA decide otherwise.
# With WHEEL_ONLY set it installs what a build needs and builds nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=$venv/bin/python

say() { echo "moelora: $*"; }

# The archs of this machine's GPUs that there are kernels for, such as "9.0a;10.3a"; empty: none.
gpu_archs() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    grep -xE '9\.0|10\.0|10\.3' | sort -u | sed 's/$/a/' | paste -sd ';' || true
}

if [ ! -x "$python" ]; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { say "Python 3.10 or newer is needed"; exit 1; }
  say "creating the virtual environment $venv"
  python3 -m venv "$venv"
fi

if ! "$python" -c 'import torch' 2>/dev/null; then
  say "installing $TORCH"
  # Unquoted: TORCH may hold options of pip.
  "$venv/bin/pip" install -q $TORCH
fi
"$python" tools/requirements.py build run test demo | "$venv/bin/pip" install -q -r /dev/stdin

if [ -n "${WHEEL_ONLY:-}" ]; then
  exit
fi
if "$python" tools/build_is_current.py; then
  say "using the build that is there"
  exit
fi
if [ -z "${MOELORA_CUDA:-}${TORCH_CUDA_ARCH_LIST:-}" ]; then
  archs=$(gpu_archs)
  if [ -n "$archs" ]; then
    export TORCH_CUDA_ARCH_LIST=$archs
    say "building for the GPU that is here, $archs"
  else
    export MOELORA_CUDA=0
    say "no GPU with kernels here, building for the CPU alone (a minute or two)"
  fi
fi
"$venv/bin/pip" install -v --no-build-isolation --no-deps -e .
