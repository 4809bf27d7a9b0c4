#!/usr/bin/env bash
# Makes the sdist and checks that it is complete: every file of the repository is in it, and it builds, CPU-only, away from
# the repository, out of the same sources.
#   tools/check_sdist.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
unset PYTHONPATH

"$python" -m pip install -q build
"$python" -m build --sdist --no-isolation --outdir "$away" >"$away/log" 2>&1 || { cat "$away/log"; exit 1; }
tar -xzf "$away"/moelora-*.tar.gz -C "$away"
unpacked=$(echo "$away"/moelora-*/)

missing=$(comm -23 <(git ls-files | grep -vE '^\.(ci/|gitignore)' | sort) \
  <(cd "$unpacked" && find . -type f | sed 's|^\./||' | sort))
if [ -n "$missing" ]; then
  echo "not in the sdist:" $missing
  exit 1
fi

MOELORA_CUDA=0 "$python" -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$away" "$unpacked"
"$python" - "$away"/moelora-*.whl <<'PY'
import json
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, "moelora")
from _source_hash import source_hash

built = json.loads(zipfile.ZipFile(sys.argv[1]).read("moelora/_build_info.json"))
if built["source_hash"] != source_hash(Path.cwd()):
    raise SystemExit("csrc/, third_party/ or CMakeLists.txt differ between the sdist and the repository")
print("the sdist is complete and builds by itself")
PY
