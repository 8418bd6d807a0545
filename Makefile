# Each command sets itself up: the first one creates .venv and installs the pinned dependencies.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint clean

demo: $(READY)
	$(BIN)/outrider demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'Outrider needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
