"""The documents agree with the tree: every schema is explained as it is registered, every named file exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "third_party" / "README.md"])

_SCHEMA = re.compile(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)')
_FOLDERS = r"(?:benchmarks|csrc|docs|examples|moelora|tests|third_party|tools|\.ci)/"
_TOP_FILES = r"Makefile|LICENSE|setup\.py|CMakeLists\.txt|pyproject\.toml"
_PATH = re.compile(rf"(?<![\w./-])({_FOLDERS}[\w./*-]*[\w*/]|{_TOP_FILES})(?![\w<])")
_VARIABLE = re.compile(r'(?:environ(?:\.get\(|\[)"|ENV\{|^_ENVIRONMENT = ")([A-Z_]+)', re.MULTILINE)
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
    import moelora.pool
    import moelora.reference
    import moelora.weights

    for document in DOCUMENTS:
        for dotted in set(re.findall(r"`(moelora(?:\.[A-Za-z]\w*)+)", document.read_text())):
            value = moelora
            for name in dotted.split(".")[1:]:
                assert hasattr(value, name), f"{document.name}: {dotted}"
                value = getattr(value, name)


def test_readme_names_every_environment_variable_that_is_read():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("moelora/**/*.py"), *ROOT.glob("third_party/*.cmake")]
    read = set()
    for source in sources:
        read |= set(_VARIABLE.findall(source.read_text()))
    read -= {"CUDA_HOME"}
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert len(read) >= 5
    assert table >= read


def test_readme_example_runs():
    import torch

    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    small = example.replace("16, 128, 8, 2048, 768, 8, 16", "16, 32, 8, 64, 48, 8, 8")
    assert small != example
    names: dict = {}
    exec(small, names)
    assert names["y"].shape == (16, 64)
    assert torch.isfinite(names["y"]).all()


def test_readme_memory_figures():
    def gib(components: int) -> float:
        slots, experts, hidden, inner, rank = 16, 128, 2048, 768, 32
        elements = components * rank * hidden + 2 * inner * rank + rank * inner + hidden * rank
        return slots * experts * elements * 2 / 2**30

    text = (ROOT / "README.md").read_text()
    assert f"{gib(2):.2f} GiB per layer with C = 2" in text
    assert f"{gib(1):.2f} GiB with C = 1" in text
