"""Prints requirements from pyproject.toml, torch left out, for `pip install -r`.

Arguments: any of build, run, test, demo.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def main(groups: list[str]) -> None:
    pyproject = tomllib.loads(Path(__file__).with_name("..").joinpath("pyproject.toml").resolve().read_text())
    requirements = {
        "build": pyproject["build-system"]["requires"],
        "run": pyproject["project"]["dependencies"],
        **pyproject["project"]["optional-dependencies"],
    }
    for group in groups:
        print(*(line for line in requirements[group] if not line.startswith("torch")), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
