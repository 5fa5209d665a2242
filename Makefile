# Two commands to learn: `make run` and `make test`. Each sets up its own .venv the first time.

VENV  := .venv
MADE  := $(VENV)/pyvenv.cfg
BIN   := $(VENV)/bin
READY := $(VENV)/.phalanx-ready
DEV   := $(VENV)/.phalanx-dev
TOOLS := $(VENV)/.phalanx-packages
# What is never imported need not be compiled: pip compiling 21,000 files took half of the set-up. What is imported is
# compiled then and kept, unless the caller's environment says otherwise.
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable
unexport PYTHONDONTWRITEBYTECODE
export PYTHON
JOB   ?= examples/first-run.toml

.PHONY: run test check setup clean always

run: $(READY)  ## build a corpus, plan, train a small Llama on four CPU ranks, report, check
	$(BIN)/phalanx train $(JOB)
	@$(BIN)/phalanx check "$$(ls -td runs/*/ | head -n 1)" || test $$? -eq 1  # findings are told; they are no failure

test: $(DEV) $(TOOLS)  ## run every test and every doctest
	$(BIN)/python .ci/tests.py

check: $(DEV)  ## formatter, linter, strict types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_layers.py

setup: $(DEV)

# A stamp is younger than pyproject.toml exactly when the environment holds what it asks for. To train takes less than to
# test: whoever only wants `make run` gets no browser driver and no trackers.
$(READY): pyproject.toml $(MADE)
	$(PIP) '.[train,parquet]'
	@touch $@

$(DEV): pyproject.toml $(MADE)
	$(PIP) '.[train,parquet,dev]'
	@touch $(READY) $@

# Looked at every time, made anew only when PYTHON names another Python: then it is younger than the stamps.
$(MADE): always
	@bash .ci/venv $(VENV)

# A browser, a Prometheus server and an etcd for the tests; where they cannot be had, those tests skip.
$(TOOLS): .ci/packages | $(DEV)
	@bash .ci/packages $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
