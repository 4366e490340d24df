# Each target makes the virtual environment first if it is missing or older than what it is made from.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DATA := ../shared/data
# Quick tests: a process for each core. Those that start servers, workers or ranks: a file at a time in each of a few.
QUICK := --numprocesses logical --maxprocesses 8 --dist worksteal
WHOLE := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: run test quick slow lint up down bench clean

run: $(VENV)/.ready
	$(BIN)/dejavu run

# The checks of types have one process: quick tests run beside them.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory --jobs 2 lint quick
	$(PYTEST) -m "integration and not slow and not gpu" $(WHOLE)

quick: $(VENV)/.ready
	$(PYTEST) -m "not slow and not gpu and not integration" $(QUICK)

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.database --rows 1000000
	test ! -d $(DATA)/dp_cases || $(BIN)/python -m benchmarks.search --cases $(DATA)/dp_cases --microbatches 16,64
	$(BIN)/python -m benchmarks.search --heterogeneous
	$(BIN)/python -m benchmarks.search --scale
	$(BIN)/python -m benchmarks.search --anytime
	$(BIN)/python -m benchmarks.search --quality
	$(BIN)/python -m benchmarks.knapsack
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.feedback
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.initialization
	$(BIN)/python -m benchmarks.cost --memory
	$(BIN)/python -m benchmarks.cost --profiling-time
	test ! -d $(DATA) || $(BIN)/python -m benchmarks.cost --fp16 $(DATA)/vidur/compute_a100_a40.parquet
	test ! -d $(DATA) || $(BIN)/python -m benchmarks.cost --collectives $(DATA)/alpa/prof_database.parquet
	test ! -d $(DATA) || $(BIN)/python -m benchmarks.cost --iterations $(DATA)/vtrain/a100_single_node.csv
	test ! -d $(DATA) || $(BIN)/python -m benchmarks.cost --kernels $(DATA)/neusight/kernels.parquet \
		--models $(DATA)/neusight/models.parquet --devices $(DATA)/neusight/devices.csv \
		--train P100,V100,T4,A100-40 --test A100-80,L4

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up down: $(VENV)/.ready
	$(BIN)/dejavu $@

# Without --no-compile pip compiles all 20,000 modules on one core, for a minute; what is imported is compiled then.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "making the environment in $(VENV) (one to three minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) .dejavu mlflow.db mlartifacts build *.egg-info
