# Everything a fresh machine needs is Python 3.11+ and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: up test test-slow test-gpu lint format proto clean

## Local cluster with the demo model; prints a curl line that works.
up: $(STAMP)
	$(BIN)/baton up $(ARGS)

## The tests that CI runs.
test: lint
	$(BIN)/pytest $(ARGS)

## Long suites: more fault repetitions, bigger property tests.
test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

## Needs a CUDA device.
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## Regenerates common/pb from proto/.
proto: $(STAMP)
	$(BIN)/python -m common.rpc.codegen

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
