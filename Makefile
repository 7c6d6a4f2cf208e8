# Every target makes its own virtual environment when there is none.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test tests test-long chaos chaos-quick bench bench-quick bench-trees bench-gpu lint proto clean

demo: $(STAMP)
	$(BIN)/outrider demo

# Lint beside the tests, which leave a core free now and then; two clusters at once would starve each other's drafters.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint tests

tests: $(STAMP)
	$(BIN)/pytest

# A million frames, ten thousand sessions a soak and their like: three quarters of an hour.
test-long: $(STAMP)
	$(BIN)/pytest -m long

# Kills, freezes, black holes and restarts under 32 sessions: at most half an hour. ARGS adds flags: ARGS='--seed 8'.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --whole $(ARGS)

# A little of it: three minutes.
chaos-quick: $(STAMP)
	$(BIN)/python -m tests.chaos --quick $(ARGS)

# All suites: about an hour and a half on two cores. ARGS adds flags, for example ARGS='--suite rows --target 150M'.
bench: $(STAMP)
	$(BIN)/python -m bench $(ARGS)

# The first suite, small: at most five minutes.
bench-quick: $(STAMP)
	$(BIN)/python -m bench --quick $(ARGS)

# Tree constructions x acceptance rules x drafters, by acceptance length: at most ten minutes on two cores.
bench-trees: $(STAMP)
	$(BIN)/python -m bench.trees $(ARGS)

# The engine on an accelerator, where there is one, against its bandwidth.
bench-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STAMP)
	$(BIN)/python -m protos.generate

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,ray,transformers,dev,bench]'
	touch $@
