# Two commands to learn: `make run` and `make test`. Each sets up its own .venv the first time.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.phalanx-ready
TOOLS := $(VENV)/.phalanx-packages
export PYTHON
JOB   ?= examples/first-run.toml

.PHONY: run test check setup clean

run: $(STAMP)  ## build a corpus, plan, train a small Llama on four CPU ranks, report
	$(BIN)/phalanx train $(JOB)

test: $(STAMP) $(TOOLS)  ## run every test and every doctest
	$(BIN)/python -m pytest -q

check: $(STAMP)  ## formatter, linter, strict types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_layers.py

setup: $(STAMP)

# The stamp is younger than pyproject.toml exactly when the environment holds what it asks for.
$(STAMP): pyproject.toml .ci/venv
	@bash .ci/venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,parquet,dev]'
	@touch $@

# A browser and a Prometheus server for the tests; where they cannot be had, those tests skip.
$(TOOLS): .ci/packages | $(STAMP)
	@bash .ci/packages $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
