#!/usr/bin/env bash
# Installs a wheel into a fresh environment, away from the source tree, and runs what a stranger would: the import,
# moelora.check, an import without moelora._C, and the CPU tests.
#   tools/check_wheel.sh WHEEL [PYTEST_ARGS...]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
shift
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

python3 -m venv "$away/venv"
python=$away/venv/bin/python
"$away/venv/bin/pip" install -q "${TORCH:-torch==2.13.0}"
"$away/venv/bin/pip" install -q "$wheel"
(cd "$root" && "$python" tools/requirements.py test demo) | "$away/venv/bin/pip" install -q -r /dev/stdin

cp -r "$root/tests" "$root/pyproject.toml" "$root/examples" "$root/docs" "$root/README.md" "$away"
cd "$away"
"$python" -m moelora.check
"$python" -m pytest "$@" tests
rm "$("$python" -c 'import moelora._C; print(moelora._C.__file__)')"
"$python" -c 'import moelora, torch; print("without _C:", moelora.ops.pack_topk(torch.ones(1, 1), torch.ones(1, 1).int()))'
