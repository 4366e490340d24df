# Each target makes the virtual environment first if it is missing or older than what it is made from.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: run test quick slow lint up down bench clean

run: $(VENV)/.ready
	$(BIN)/dejavu run

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

quick: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow and not gpu and not integration"

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.database --rows 1000000
	test ! -d ../shared/data/dp_cases || $(BIN)/python -m benchmarks.search --cases ../shared/data/dp_cases --microbatches 16,64

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up down: $(VENV)/.ready
	$(BIN)/dejavu $@

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "making the environment in $(VENV) (one to three minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) .dejavu mlflow.db mlartifacts build *.egg-info
