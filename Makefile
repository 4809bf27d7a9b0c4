# `make demo` and `make test`, from a fresh clone on a bare machine: tools/prepare.sh sets up what they need.
# Settings, as environment variables or `make NAME=value`:
#   TORCH        what to give to pip where torch is missing
#   PYTEST_ARGS  options of the test run
# and those of the build (README, "Environment variables").

export TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -q -n 2

# The active virtual environment, else .venv.
VENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),$(CURDIR)/.venv)
PYTHON := $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)

.PHONY: demo test wheel prepare

demo: prepare
	$(PYTHON) examples/quickstart.py

test: prepare
	$(PYTHON) -m pytest $(PYTEST_ARGS)

# One wheel in dist/ for the archs of TORCH_CUDA_ARCH_LIST (default: all three), with its manylinux tag.
wheel:
	@WHEEL_ONLY=1 tools/prepare.sh $(VENV)
	tools/wheel.sh $(PYTHON)

prepare:
	@tools/prepare.sh $(VENV)
