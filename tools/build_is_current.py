"""Exits 0 where moelora/ holds a library that was built from the sources as they are now, else 1."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "moelora"))
from _source_hash import source_hash  # noqa: E402  (moelora itself imports only once it is built)


def build_is_current() -> bool:
    info = ROOT / "moelora" / "_build_info.json"
    if not info.exists() or not (ROOT / "moelora" / "libmoelora.so").exists():
        return False
    return json.loads(info.read_text())["source_hash"] == source_hash(ROOT)


if __name__ == "__main__":
    sys.exit(0 if build_is_current() else 1)
