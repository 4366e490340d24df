# Each target makes the virtual environment first if it is missing or older than what it is made from.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
TOOLS := .venv-tools
DATA := ../shared/data
RESULTS ?= .dejavu/benchmarks
BENCH := $(BIN)/python -m benchmarks
# Without --no-compile pip compiles all 20,000 modules on one core, for a minute; what is imported is compiled then.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Quick tests: a process for each core. Those that start servers, workers or ranks wait for these, so one process more
# than there are cores, a file at a time in each.
QUICK := --numprocesses logical --maxprocesses 8 --dist worksteal
WHOLE = --numprocesses $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() + 1))") --dist loadfile --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Every process of a training, a server or a test compiles torch anew (8 s) where containers set this.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test quick slow chaos gpu gpu-rehearsal lint up down bench paper docs audit sbom clean

run: $(VENV)/.ready
	$(BIN)/dejavu run

# The checks of types have one process: quick tests run beside them.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory --jobs 2 lint quick
	$(PYTEST) -m "integration and not slow and not gpu" $(WHOLE)

quick: $(VENV)/.ready
	$(PYTEST) -m "not slow and not gpu and not integration" $(QUICK)

# Tables on the screen, and JSON with machine, date and command in $(RESULTS).
bench: $(VENV)/.ready
	$(BENCH).database --rows 1000000 --json $(RESULTS)/database.json
	test ! -d $(DATA)/dp_cases || $(BENCH).search --cases $(DATA)/dp_cases --microbatches 16,64 --json $(RESULTS)/search-cases.json
	$(BENCH).operators --placement --json $(RESULTS)/operators-placement.json
	$(BENCH).search --heterogeneous --json $(RESULTS)/search-heterogeneous.json
	$(BENCH).search --scale --json $(RESULTS)/search-scale.json
	$(BENCH).search --anytime --json $(RESULTS)/search-anytime.json
	$(BENCH).search --quality --json $(RESULTS)/search-quality.json
	$(BENCH).search --feasibility --json $(RESULTS)/search-feasibility.json
	$(BENCH).search --scales --json $(RESULTS)/search-scales.json
	$(BENCH).search --workers --json $(RESULTS)/search-workers.json
	$(BENCH).search --gradient --json $(RESULTS)/search-gradient.json
	$(BENCH).bound --json $(RESULTS)/bound.json
	$(BENCH).gradients --json $(RESULTS)/gradients.json
	$(BENCH).knapsack --json $(RESULTS)/knapsack.json
	$(BENCH).schedules --json $(RESULTS)/schedules.json
	$(BENCH).capture --json $(RESULTS)/capture.json
	$(BENCH).published --json $(RESULTS)/published.json
	test ! -d $(DATA)/sailor || $(BENCH).plans $(DATA)/sailor --json $(RESULTS)/plans.json
	$(BENCH).feedback --json $(RESULTS)/feedback.json
	$(BENCH).measuring --json $(RESULTS)/measuring.json
	$(BENCH).training --losses --json $(RESULTS)/training-losses.json
	$(BENCH).training --throughput --json $(RESULTS)/training-throughput.json
	$(BENCH).orchestration --json $(RESULTS)/orchestration.json
	$(BENCH).pipeline --json $(RESULTS)/pipeline.json
	$(BENCH).initialization --json $(RESULTS)/initialization.json
	$(BENCH).cost --memory --json $(RESULTS)/cost-memory.json
	test ! -d $(DATA)/neusight || $(BENCH).cost --kernels $(DATA)/neusight/kernels.parquet --models $(DATA)/neusight/models.parquet \
		--devices $(DATA)/neusight/devices.csv --json $(RESULTS)/cost-left-out.json
	$(BENCH).cost --attention --json $(RESULTS)/cost-attention.json
	$(BENCH).cost --profiling-time --json $(RESULTS)/cost-profiling-time.json
	test ! -d $(DATA) || $(BENCH).cost --fp16 $(DATA)/vidur/compute_a100_a40.parquet --json $(RESULTS)/cost-fp16.json
	test ! -d $(DATA) || $(BENCH).cost --collectives $(DATA)/alpa/prof_database.parquet --json $(RESULTS)/cost-collectives.json
	test ! -d $(DATA) || $(BENCH).cost --iterations $(DATA)/vtrain/a100_single_node.csv --json $(RESULTS)/cost-iterations.json
	test ! -d $(DATA) || $(BENCH).cost --kernels $(DATA)/neusight/kernels.parquet \
		--models $(DATA)/neusight/models.parquet --devices $(DATA)/neusight/devices.csv \
		--train P100,V100,T4,A100-40 --test A100-80,L4 --json $(RESULTS)/cost-kernels.json

# Every table and figure of the papers beside ours: PAPER/index.html, under ten minutes on two quiet cores.
PAPER := paper
paper: $(VENV)/.ready
	$(BENCH).paper --folder $(PAPER) --json $(PAPER)/paper.json

slow: $(VENV)/.ready
	$(PYTEST) -m slow $(WHOLE)

# Half an hour of whole runs with random faults in them; what is left or lost after one is told, and is exit 1.
chaos: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BENCH).chaos --seed 0 --minutes 30 --json $(RESULTS)/chaos.json

# On a machine with a GPU, in at most 9 minutes: predict, then measure and train (docs/gpu.md). GPU_PYTHON is the Python
# whose torch has CUDA, where it is not the environment's own.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.ready)
	$(GPU_PYTHON) -m benchmarks.gpu --json $(RESULTS)/gpu.json

# The same code on CPU cores, with tiny models.
gpu-rehearsal: $(VENV)/.ready
	$(BENCH).gpu --rehearse --json $(RESULTS)/gpu-rehearsal.json

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up down: $(VENV)/.ready
	$(BIN)/dejavu $@

# Into site/, for a browser: nothing on its pages comes from the network.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.ready-docs: $(VENV)/.ready
	$(INSTALL) --editable ".[docs]"
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "making the environment in $(VENV) (one to three minutes)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[test]"
	@echo "compiling the searches' loops (once per machine, about a minute at most)"
	$(BIN)/python -m dejavu.planning.loops
	@touch $@

# Known vulnerabilities of the pinned versions, by pip-audit. It asks the package index for each of them, and fails
# where the index cannot tell: a mirror without that service proves nothing.
audit: $(TOOLS)/.ready
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# What is installed, with versions and licences, as a CycloneDX document; nothing is sent anywhere.
sbom: $(VENV)/.ready $(TOOLS)/.ready
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON --output-file sbom.json $(BIN)/python

# Apart from what is looked at.
$(TOOLS)/.ready: Makefile
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

clean:
	rm -rf $(VENV) $(TOOLS) sbom.json .dejavu mlflow.db mlartifacts build site *.egg-info
