# make demo   a language model learns under a trust region     make test   the tests (make test-llm: those that train through TRL)
# make check  lint, types, fast tests                          make bench  benchmarks, results kept in benchmarks/results.json

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest --numprocesses 2 --jaxtyping-packages corral,typecheck.checked
READY := $(VENV)/.ready

.PHONY: setup demo test test-llm check lint types bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert v >= (3, 11), f"corral needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 setup"'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,llm,task,robot]'
	@touch $@

demo: setup
	$(RUN) -m corral.cli train

test: setup
	$(PYTEST) -m 'not llm' --cov --cov-report term

test-llm: setup
	$(PYTEST) -m llm

check: lint types
	$(PYTEST) -m 'not llm and not wheel'

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: setup
	$(RUN) -m mypy

bench: setup
	$(RUN) benchmarks/projection_steps.py --save

clean:
	rm -rf $(VENV) dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
