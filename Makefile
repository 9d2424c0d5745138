# Two commands for a fresh machine with Python 3.11 or newer: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEVICE ?= cuda
SEED ?= 1
BUDGET ?= 900
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# on all cores, where pip compiles on one; it passes over files that are not of this Python, as pip does
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv || true
TARGET ?= wire recipes limits accounts personal-models packs gguf bases tables chats api
MINUTES ?= 10
GPU_BENCHMARKS := gpu-local_step_embedded_gpu gpu-local_step_gpt2_gpu gpu-local_step_llama1b_gpu gpu-local_step_smollm2_gpu gpu-cobo_resnet9_gpu gpu-ddome_gpu

.PHONY: release quickstart team test test-all chaos fuzz lint format docs benchmarks gpu gpu-tests $(GPU_BENCHMARKS) clean

quickstart: .venv/.run  ## set up, then train four personal language models and compare
	$(BIN)/coterie run quickstart

team: .venv/.run  ## set up, then train four people's assistants together: BASE=FILE.gguf, a file of SmolLM2-135M-Instruct; default: from the Hub
	$(if $(BASE),$(PIP) --editable '.[gguf]')
	$(BIN)/coterie run team $(if $(BASE),--set model.base=$(BASE))

test: $(INSTALLED)  ## set up, then run the tests
	$(BIN)/pytest -n 2 --dist worksteal

test-all: $(INSTALLED)  ## also the slow tests; COTERIE_DATA names the folder of the data sets
	$(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow"

chaos: $(INSTALLED)  ## faults on purpose, 20 minutes at most: kills, clocks, disks, networks, 64 devices. SEED=n: their order; BUDGET=seconds
	CHAOS_SEED=$(SEED) CHAOS_BUDGET=$(BUDGET) timeout --foreground -s INT 1200 $(BIN)/python -m pytest -q -s tests/chaos/checks.py

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(INSTALLED)  ## every reader of foreign bytes against a fuzzer, on Linux: TARGET=recipes MINUTES=60; a finding fails
	$(PIP) --editable '.[fuzz]'
	rm -f build/fuzz/*-finding-*
	for target in $(TARGET); do nice -n 19 $(BIN)/python fuzz/run.py $$target $(MINUTES) || exit 1; done
	! ls build/fuzz/*-finding-* 2>/dev/null

docs: $(INSTALLED)  ## build the documentation site; any warning fails
	$(BIN)/python scripts/website/build.py

release: lint docs  ## all of a release but the upload: build, check, install in a fresh environment, and run there
	rm -rf dist build/release
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/release && bin/coterie doctor && bin/coterie run quickstart --set method.rounds=1 --set 'compare_with=[]'
	@echo "dist/ is ready. Its tag: v$$(build/release/bin/coterie --version | cut -d' ' -f2); the workflow release.yml uploads."

benchmarks: $(INSTALLED)  ## measure speed, memory and scale on this machine, and compare with what was aimed at (hours)
	$(BIN)/python benchmarks/suite.py

gpu: gpu-tests $(GPU_BENCHMARKS)  ## on a machine with a GPU: the tests on it and its benchmarks, each part at most 10 minutes. DEVICE=xpu: another accelerator; BIN=FOLDER: another Python, with a torch of its own

gpu-tests: $(if $(filter .venv/bin,$(BIN)),$(INSTALLED))
	COTERIE_TEST_DEVICE=$(DEVICE) timeout 600 $(BIN)/python -m pytest -n 4 -m "slow or not slow" tests/accelerators/checks.py

$(GPU_BENCHMARKS): $(if $(filter .venv/bin,$(BIN)),$(INSTALLED))
	timeout 600 $(BIN)/python benchmarks/suite.py --only $(@:gpu-%=%)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "coterie needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(INSTALLED): .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	@$(COMPILE)
	@touch $@ .venv/.run

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
