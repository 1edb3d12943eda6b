PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
FRESH ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench lock clean

help: ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## make .venv from the hash-pinned locks, with every command in .venv/bin

$(VENV)/.ready: requirements/build.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-build-isolation -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lint: setup ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: setup ## renew the locks from pyproject.toml
	requirements/renew

clean: ## remove .venv, caches and what the demo left
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
