# make demo and make test set up everything they need in .venv; the second time they start at once.
.PHONY: help demo test test-slow lint format bench bench-gpu clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

help:
	@echo "make demo       train on the embedded letters by three methods, write a report (out/demo/report.html)"
	@echo "make test       run the test suite"
	@echo "make test-slow  run the tests that take minutes"
	@echo "make lint       check style and types"
	@echo "make bench      time the field and the evaluation on this CPU (out/bench/)"
	@echo "make bench-gpu  time the field, the loss, the evaluation and training on this GPU (out/bench/gpu.csv, gpu.png)"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pfml needs Python >= 3.11: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || { \
		echo "python's venv module is missing, installing it"; \
		apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/pfml demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/field.py

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
