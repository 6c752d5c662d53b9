# Every target installs what it needs into .venv first; nothing but python3.11+, make and pip is
# asked of the machine. `make PYTHON=python3.12 VENV=/tmp/venv test` uses another interpreter or
# place.

PYTHON ?= python3
VENV ?= .venv
# Test processes. Tracing is Python and takes one core each, and every process has its own eight
# virtual devices. 0 runs in one process, for a debugger.
WORKERS ?= 2
# More arguments for pytest: `make test ARGS="-k flat -x"`.
ARGS ?=

# Sizes up to which `make bench-step` follows the time before the first step.
LEAVES ?= 10 30 100 300 1000 2000
LAYERS ?= 12 24 48 96

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
PYTEST_PARALLEL := $(PYTEST) -n $(WORKERS) --dist worksteal --durations=10 --durations-min=3
PACKAGES := wusharding $(wildcard large_scale)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The pinned pyright is meant: no look for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help venv test test-all check format demo demo-multiprocess bench-update bench-step bench-optimizers clean
.DELETE_ON_ERROR:

help: ## what the targets do
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP) ## create .venv and install the project with all it needs

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,demo]'
	@touch $@

test: venv ## the fast tests, on eight virtual CPU devices
	$(PYTEST_PARALLEL) -m "not slow" $(ARGS)

test-all: venv ## all tests
	$(PYTEST_PARALLEL) $(ARGS)

check: venv ## format, lint, types, import contract, doctests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python $(PACKAGES)
	$(PYTEST) --doctest-modules tests/test_import_contract.py $(PACKAGES)

format: venv ## rewrite the files as `make check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: venv ## the demonstration
	$(BIN)/python -m benchmarks.demo

demo-multiprocess: venv ## two processes train, one goes on from their checkpoint
	$(BIN)/python -m benchmarks.demo_multiprocess

bench-update: venv ## time and memory of the weight update, replicated and sharded
	$(BIN)/python -m benchmarks.update

bench-step: venv ## whole train steps and the time to transform them; rewrites their page in docs/
	$(BIN)/python -m benchmarks.step --leaves $(LEAVES) --layers $(LAYERS) --page docs/step_benchmark.md

bench-optimizers: venv ## the same, optimizer by optimizer
	$(BIN)/python -m benchmarks.optimizers

clean: ## remove .venv and everything that tools left
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
