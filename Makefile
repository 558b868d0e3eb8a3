# make demo   train three objectives side by side          make test   every test, from a fresh clone
# make check  lint, types, fast tests                      make bench  benchmarks, results kept in benchmarks/results.json

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest --numprocesses 2 --jaxtyping-packages corral,typecheck.checked
READY := $(VENV)/.ready

.PHONY: setup demo test check lint types bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert v >= (3, 11), f"corral needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 setup"'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,llm]'
	@touch $@

demo: setup
	$(RUN) examples/troll_in_100_lines.py

test: setup
	$(PYTEST) --cov --cov-report term

check: lint types
	$(PYTEST) -m 'not wheel'

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: setup
	$(RUN) -m mypy

bench: setup
	$(RUN) benchmarks/projection_steps.py --save

clean:
	rm -rf $(VENV) dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
