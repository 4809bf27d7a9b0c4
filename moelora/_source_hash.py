"""A hash of everything the compiled library is made from, so that a stale library is noticed."""

import hashlib
from pathlib import Path


def source_hash(root: Path) -> str:
    """SHA-256 over names and contents of csrc/, third_party/*.cmake and CMakeLists.txt below `root`."""
    files = [root / "CMakeLists.txt", *root.glob("third_party/*.cmake")]
    files += [path for path in root.glob("csrc/**/*") if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
