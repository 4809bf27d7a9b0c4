#!/usr/bin/env bash
# Installs a wheel into a fresh environment, away from the source tree, and runs what a stranger would: moelora.check,
# the CPU tests, and an import without moelora._C.
#   tools/check_wheel.sh WHEEL [PYTEST_ARGS...]
# Settings: TORCH (what to give to pip, default torch==2.13.0), PYTHON (the Python to make the environment with).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
shift
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
unset PYTHONPATH

"${PYTHON:-python3}" -m venv "$away/venv"
python=$away/venv/bin/python
# Unquoted: TORCH may hold options of pip.
"$python" -m pip install -q ${TORCH:-torch==2.13.0}
"$python" -m pip install -q "$wheel[test,demo]"

cp -r "$root/tests" "$root/examples" "$root/pyproject.toml" "$away"
cd "$away"
# These read the sources, or need the tools that a wheel is built with; test_readme.py wants them all to be there.
rm tests/test_docs.py tests/test_packaging.py tests/test_readme.py tests/test_sass.py
"$python" -m moelora.check
"$python" -m pytest "$@" tests

rm "$("$python" -c 'import moelora._C; print(moelora._C.__file__)')"
"$python" - <<'PY'
import torch

import moelora

packed = moelora.ops.pack_topk(torch.ones(1, 1), torch.full((1, 1), 7))
assert packed.item() == (7 << 16) | 0x3F80
try:
    moelora.explain(*[torch.empty(1, 2, device="meta")] * 5)
except ImportError as error:
    print("without moelora._C all but moelora.explain works:", error)
else:
    raise SystemExit("moelora.explain works without moelora._C?")
PY
