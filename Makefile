# Every command makes .venv where it is missing, installs what it needs, and is safe to run again.
#   make test PYTHON=/path/to/python3.12    chooses the interpreter of a new .venv

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# DeepSpeed looks for ninja on the PATH, as in an activated environment.
RUN := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python
CANDIDATES := $(or $(PYTHON),python3.12 python3.11 python3.13 python3)
PYPROJECT_SUM := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)

# What is installed is remembered per extra and per content of pyproject.toml.
installed = $(VENV)/.installed-$(1)-$(PYPROJECT_SUM)

.PHONY: help test check format docs quickstart clean
.DELETE_ON_ERROR:

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

test: $(call installed,dev)  ## run the tests: one process first, then several processes
	$(RUN) -m pytest -q tests --ignore=tests/multi $(PYTEST_ARGS)
	$(RUN) -m pytest -q tests/multi $(PYTEST_ARGS)

check: $(call installed,dev)  ## lint, format, types and import rules
	@status=0; \
	for step in "ruff check" "ruff format --check --output-format concise" "mypy" "lint-imports --no-logo"; do \
	  echo "== $$step"; $(BIN)/$$step || status=1; \
	done; exit $$status

format: $(call installed,dev)  ## format the code and sort the imports
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format

docs: $(call installed,docs)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

quickstart: $(call installed,quickstart)  ## train and evaluate a small vision-language model on this machine
	$(RUN) scripts/quickstart.py

clean:  ## remove what was built; .venv and output/ stay
	rm -rf build dist site htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@for python in $(CANDIDATES); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$(VENV): made with $$($$python --version)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "No Python >= 3.11 with the venv module among: $(CANDIDATES). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1

$(VENV)/.installed-%-$(PYPROJECT_SUM): | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable '.[$*]'
	@rm -f $(VENV)/.installed-$*-*; touch $@
