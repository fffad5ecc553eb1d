# Only python3 and make are needed: every target first brings .venv up to what it needs.
# PYTHON picks the interpreter; PIP_FLAGS reaches pip (for example an index of CPU-only wheels).

PYTHON ?= python3
PIP_FLAGS ?=
TESTS ?=
WORKERS ?= 2
MINUTES ?= 8
TABLES ?= ../shared/tables

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS)

export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false

STARTED := $(shell date +%s)

.NOTPARALLEL:
.PHONY: demo test test-slow lint types imports docs size format \
        gpu predict-demo bench-shard bench-reshard bench-collectives tables leaderboard clean help

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

# A stamp is newer than pyproject.toml exactly when what it names is installed.
$(VENV)/made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/runs: pyproject.toml | $(VENV)/made
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/tests: pyproject.toml | $(VENV)/made
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/runs

$(VENV)/checks: pyproject.toml | $(VENV)/made
	$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@ $(VENV)/runs $(VENV)/tests

demo: $(VENV)/runs  ## train a small Llama on 4 local ranks and check it against one device
	$(BIN)/hyperparallel train llama_demo --devices 4 --mesh dp=2,tp=2 --check

test: $(VENV)/tests  ## all tests but the slow ones, by two workers; TESTS=path narrows, WORKERS=0 for one process
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(TESTS)

test-slow: $(VENV)/tests  ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow $(TESTS)

lint: $(VENV)/checks  ## ruff
	$(BIN)/ruff check .

format: $(VENV)/checks  ## let ruff mend what it can
	$(BIN)/ruff check --fix .

types: $(VENV)/checks  ## mypy, strict
	$(BIN)/mypy

imports: $(VENV)/runs  ## imports go one way
	$(BIN)/python -m checks.imports

docs: $(VENV)/runs  ## write docs/api.md from the docstrings
	$(BIN)/python -m checks.api

size: $(VENV)/runs  ## files per folder (at most 16), lines per package, files over 400 lines, long names
	$(BIN)/python -m checks.size

gpu: $(VENV)/tests  ## on CUDA devices: tests, demo, prediction, speed beside peers; MINUTES=8, one folder in runs/
	$(BIN)/python -m benchmarks.gpu --started $(STARTED) --minutes $(MINUTES)

predict-demo: $(VENV)/runs  ## describe this machine, predict the demo's step and others, run and compare them
	$(BIN)/hyperparallel doctor --calibrate
	$(BIN)/python -m benchmarks.prediction

bench-shard: $(VENV)/runs  ## one block and a small Llama against every peer
	$(BIN)/python -m benchmarks.shard

bench-reshard: $(VENV)/runs  ## redistribution plans against DTensor's planner
	$(BIN)/python -m benchmarks.reshard

bench-collectives: $(VENV)/runs  ## the collectives' own call path
	$(BIN)/python -m benchmarks.collectives

# First of its needs, so that nothing is installed for a run that can't be.
tables:
	$(if $(wildcard $(TABLES)/*.csv),,$(error no tables of published runs (*.csv) in $(TABLES): \
	name their folder with "make leaderboard TABLES=folder"))

leaderboard: tables $(VENV)/runs  ## the planner's cost model against published runs; TABLES=folder
	$(BIN)/python -m benchmarks.leaderboard --fit $(TABLES) \
		--json benchmarks/results/leaderboard.json --markdown benchmarks/results/leaderboard.md

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
