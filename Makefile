# `make demo` and `make test` start from nothing but Python 3.10+, a C/C++ compiler and make; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Once upon a time
TOKENS ?= 96

BIN := $(VENV)/bin
# setuptools warns of every editable install, at length.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
FARM := build/typing
PACKAGED := pyproject.toml $(wildcard core/native/_seam.c)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-slow lint typecheck format clean help

demo: $(VENV)/.installed ## generate from a prompt with the reference model, through the streaming engine
	$(BIN)/bmoe --profile demo -p "$(PROMPT)" -n $(TOKENS)

test: $(VENV)/.installed-dev ## run the tests
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-dev ## run the long tests: packaging and what is marked slow
	$(BIN)/python -m pytest -m slow || [ $$? -eq 5 ] # 5: there is none

lint: $(VENV)/.installed-dev ## check style and form
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

typecheck: $(VENV)/.installed-dev ## check types
	mkdir -p $(FARM)
	ln -sfn ../../core $(FARM)/bmoe
	ln -sfn ../../plugins $(FARM)/bmoe_plugins
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy scripts
	MYPYPATH=examples/bmoe-acme $(BIN)/python -m mypy examples/bmoe-acme/bmoe_acme

format: $(VENV)/.installed-dev ## rewrite files in the house form
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean: ## remove the environment, models and build files (kept wheels of llama-cpp-python stay)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis core/native/_seam.*.so

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is missing or older than Python 3.10; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make environments (venv or ensurepip is missing); on Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(PACKAGED) scripts/llama_wheel.py
	$(BIN)/python scripts/llama_wheel.py
	@echo "installing bmoe and the libraries that it uses"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools of development"
	@$(PIP) install -e ".[dev]"
	@touch $@
