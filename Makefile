# `make demo` and `make test` are all a fresh machine needs: each makes .venv first if it is missing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# One worker per core, one thread per worker: torch's own threads would only fight over the cores.
PYTEST ?= $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test check lint compile clean

help:
	@echo "make demo     train on real text and run a long sequence (a few minutes)"
	@echo "make test     run the tests"
	@echo "make check    lint, format, types and tests"
	@echo "make compile  compile every kernel for every GPU, without a GPU"
	@echo "make clean    remove .venv, caches, build output and the demo's folder"

# Threads that wait should sleep, not spin: on a busy machine that is a difference of several times.
demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/tilewise demo

test: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST)

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compile: $(READY)
	PYTHON=$(BIN)/python bash scripts/compile_offline.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .triton-* tilewise-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without an NVIDIA GPU the release is named, so that pip takes a CPU build of it where one lies on
# disk instead of gigabytes of CUDA; with a GPU the newest will do. Triton comes as a requirement of
# the package.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install --quiet torch; \
	else $(BIN)/pip install --quiet torch==2.13.0; fi
	$(BIN)/pip install --quiet --editable '.[cli,bench,sim,dev]'
	touch $@
