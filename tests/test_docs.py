"""The documents agree with the tree: every schema is explained as it is registered, every named file exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "third_party" / "README.md"])

_SCHEMA = re.compile(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)')
_FOLDERS = r"(?:benchmarks|csrc|docs|examples|moelora|tests|third_party|tools|\.ci)/"
_TOP_FILES = r"Makefile|LICENSE|setup\.py|CMakeLists\.txt|pyproject\.toml"
_PATH = re.compile(rf"(?<![\w./-])({_FOLDERS}[\w./*-]*[\w*/]|{_TOP_FILES})(?!\w)")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def registered_schemas() -> list[str]:
    text = (ROOT / "csrc" / "registration.cpp").read_text()
    return ["".join(re.findall(r'"([^"]*)"', match)) for match in _SCHEMA.findall(text)]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_schemas_are_found():
    assert len(registered_schemas()) >= 25
    assert any(schema.startswith("moe_sort.out(") for schema in registered_schemas())


@pytest.mark.parametrize("schema", registered_schemas(), ids=lambda schema: schema.split("(")[0])
def test_ops_md_quotes_the_schema_as_registered(schema):
    assert squeezed(schema) in squeezed((ROOT / "docs" / "ops.md").read_text())


def test_ops_md_quotes_no_other_schema():
    documented = re.findall(r"^(\w+(?:\.out)?)\(", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(schema.split("(")[0] for schema in registered_schemas())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document):
    text = document.read_text()
    missing = [name for name in _PATH.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in _LINK.findall(text) if not (document.parent / name).exists()]
    assert missing == []


def test_named_python_attributes_exist():
    """`moelora.x` and `moelora.ops.x` in the documents are there."""
    import moelora
    import moelora.reference
    import moelora.weights

    for document in DOCUMENTS:
        for dotted in set(re.findall(r"`(moelora(?:\.\w+)+)", document.read_text())):
            value = moelora
            for name in dotted.split(".")[1:]:
                assert hasattr(value, name), f"{document.name}: {dotted}"
                value = getattr(value, name)
