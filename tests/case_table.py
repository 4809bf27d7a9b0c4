"""Which test answers which public bug report: the table in README.md, made from the tests' docstrings.

    python tests/case_table.py     rewrites the table

A test names the entries it answers (A01, B02, ...) in its docstring. tests/test_readme.py checks that every entry is
named by a test or has a reason in NOT_TESTED.
"""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
START, END = "<!-- case table: start -->\n", "<!-- case table: end -->\n"

GROUPS = {
    "A": ("Routing", [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    "B": ("Permute, align, sort", [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
    "C": ("Grouped GEMM", [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]),
    "D": ("Activation and LoRA maths", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
    "E": ("Multi-adapter mapping", [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    "F": ("Expert and tensor parallelism", [1, 2, 3, 4, 5, 6, 8, 9, 10]),
    "G": ("Streams, CUDA graphs, memory", [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 13]),
    "H": ("torch.compile, fake tensors, autograd", [1, 3, 4, 5, 6, 7, 8]),
    "I": ("Install, build, wheels", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    "J": ("Adapter file formats", [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    "K": ("API and usability", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
}

# Entries without a test of their own, and why. Those of I are checked by .ci/run, not by pytest.
NOT_TESTED = {
    "C13": "No shape that the checks let through makes a launch fail; every launch's result is checked and raised.",
    "I06": "No family target (100f) is built, which is what cuobjdump cannot tell apart.",
    "I07": "A matter of the build machine: setup.py limits jobs by memory and honours MAX_JOBS; README gives times.",
    "K03": "A question to the documents: README says which weights can have adapters.",
}


def entries() -> list[str]:
    return [f"{letter}{number:02d}" for letter, (_, numbers) in GROUPS.items() for number in numbers]


def tests_by_entry() -> dict[str, list[str]]:
    """Entry to `file: test` of every test whose docstring names it."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for entry in re.findall(r"\b[A-K]\d\d\b", ast.get_docstring(node) or ""):
                    name = f"`{path.relative_to(FOLDER).with_suffix('')}: {node.name.removeprefix('test_')}`"
                    found.setdefault(entry, []).append(name)
    return found


def table() -> str:
    tests = tests_by_entry()
    lines = []
    for letter, (title, numbers) in GROUPS.items():
        lines += [f"### ({letter.lower()}) {title}", "", "| entry | tests |", "|---|---|"]
        for number in numbers:
            entry = f"{letter}{number:02d}"
            answers = list(dict.fromkeys(tests.get(entry, [])))
            lines.append(f"| {entry} | {'<br>'.join(answers) or 'not tested: ' + NOT_TESTED.get(entry, '?')} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def split_readme() -> tuple[str, str, str]:
    """What stands before, inside and after the marks."""
    before, rest = README.read_text(encoding="utf-8").split(START)
    inside, after = rest.split(END)
    return before + START, inside, END + after


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(before + "\n" + table() + after, encoding="utf-8")
