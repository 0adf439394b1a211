# make demo and make test set up .venv on first use, make test-floor .venv-floor.
.PHONY: help demo test test-slow test-floor browser lint format dist bench bench-quick bench-gpu docs notebooks gallery reproduce-glyphs clean

PYTHON ?= python3
BIN := .venv/bin
# One more than there are cores: many tests wait for processes of their own.
WORKERS := $(shell expr $$(nproc) + 1)
READY := .venv/.ready
FLOOR := .venv-floor

help:
	@echo "make demo       train three methods on the embedded glyphs, write a report (out/demo/report.html)"
	@echo "make test       run the test suite"
	@echo "make test-slow  run the tests that take minutes"
	@echo "make test-floor run the quick tests with the oldest versions that pyproject.toml allows (.venv-floor, 8 GB)"
	@echo "make lint       check style and types"
	@echo "make dist       build the wheel and the source archive, check them for an index (dist/)"
	@echo "make bench      time the field and the evaluation on this CPU (out/bench/)"
	@echo "make bench-quick  compare ratios with benchmarks/baseline.json, fail beyond 25 %"
	@echo "make format     fix style"
	@echo "make docs       build the documentation site (out/site/index.html); needs no network"
	@echo "make notebooks  run the notebooks of docs/notebooks again and store their outputs"
	@echo "make gallery    shoot the pages of the docs again (docs/gallery/), on free photographs of installed packages"
	@echo "make bench-gpu  time the field, the loss, the evaluation, teachers and training on this GPU (out/bench/gpu.csv, gpu.png)"
	@echo "make reproduce-glyphs  run all experiments of the paper on the embedded glyphs, at most 40 minutes on 2 cores"

define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pfml needs Python >= 3.11: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(1) || { \
		echo "python's venv module is missing, installing it"; \
		apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(1); }
	$(1)/bin/python -m pip install --quiet --upgrade pip
endef

$(READY): pyproject.toml
	$(call environment,.venv)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(READY)

$(FLOOR)/.ready: pyproject.toml tools/floor.py
	$(call environment,$(FLOOR))
	$(FLOOR)/bin/python tools/floor.py > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --constraint $(FLOOR)/constraints.txt --editable '.[dev,trackio]'
	@touch $(FLOOR)/.ready

demo: $(READY)
	$(BIN)/pfml demo

# Compiled files are kept, also where the environment says otherwise: the tests start many processes.
test: $(READY) browser
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: $(READY) browser
	$(BIN)/python -m pytest -m slow

# Without what tests this code rather than what it stands on: pages in a browser, kills, ranks, the paper's tables.
LONG := tests/distributed tests/faults tests/paper tests/serving/test_serving_page.py
test-floor: $(FLOOR)/.ready
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "not slow" --all-packages $(LONG:%=--ignore=%)

# The search page is tested in Debian's chromium.
browser:
	@command -v chromium > /dev/null || { \
		echo "chromium is missing, installing it"; \
		apt-get update -qq && apt-get install -y -qq chromium > /dev/null; } || \
		echo "chromium cannot be installed here: the tests of the search page will be skipped"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Strict: a dead link, or a page that would load anything from elsewhere, fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: $(READY)
	$(BIN)/python tools/notebooks.py

gallery: $(READY) browser
	$(BIN)/python tools/gallery.py

bench: $(READY)
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/field.py

bench-quick: $(READY)
	$(BIN)/python benchmarks/quick.py

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

# The budgets are minutes, an upper bound for each experiment; the next call resumes the rest.
GLYPHS := --datasets glyphs --seeds 0 --out out/experiments
FEW := --methods proxy-anchor pfml pfml-log
reproduce-glyphs: $(READY)
	$(BIN)/pfml experiment retrieval $(GLYPHS) --epochs 4 --jobs 2 --budget 7
	$(BIN)/pfml experiment small-embedding $(GLYPHS) $(FEW) --epochs 4 --jobs 2 --budget 3
	$(BIN)/pfml experiment noise $(GLYPHS) $(FEW) --epochs 4 --jobs 2 --budget 7
	$(BIN)/pfml experiment alignment $(GLYPHS) --epochs 4 --jobs 2 --budget 2
	$(BIN)/pfml experiment ablation $(GLYPHS) --epochs 4 --jobs 2 --budget 9
	$(BIN)/pfml experiment mlrc $(GLYPHS) --methods proxy-anchor pfml-log --epochs 4 --jobs 2 --budget 5
	$(BIN)/pfml experiment timing $(GLYPHS) --epochs 2 --budget 3
	$(BIN)/pfml experiment figures $(GLYPHS) --epochs 4 --budget 2
	$(BIN)/pfml experiment theory --out out/experiments

clean:
	rm -rf .venv $(FLOOR) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
