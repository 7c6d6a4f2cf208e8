# Every target makes its own virtual environment when there is none.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test tests tests-aside test-long mutants chaos chaos-quick bench bench-quick bench-trees bench-drafters bench-gpu docs lint \
	manifests proto typescript clean

demo: $(STAMP)
	$(BIN)/outrider demo

# Tests of whole clusters one after another: two at once would starve each other's drafters. What minds a busy machine
# less runs beside them on what they leave of the processors, and is shown when it is done; so does lint.
ASIDE := $(addprefix tests/,bench cli client core deploy docs drafter engine examples gateway hostile model mutants router rpc \
	simulation store training verifier)

test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=3 lint tests tests-aside

tests: $(STAMP)
	$(BIN)/pytest $(addprefix --ignore=,$(ASIDE))

tests-aside: $(STAMP)
	nice -n 10 $(BIN)/pytest $(ASIDE) -p no:cacheprovider --color=no > .tests-aside.log 2>&1; \
		status=$$?; cat .tests-aside.log; exit $$status

# A million frames, ten thousand sessions a soak and their like: three quarters of an hour.
test-long: $(STAMP)
	$(BIN)/pytest -m long

# Breaks the product on purpose, a little at a time: a change that no test notices is an error. At most half an hour. ARGS adds flags, for
# example ARGS='--only tree'.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

# Kills, freezes, black holes and restarts under 32 sessions, then hostile callers: at most forty minutes. ARGS adds flags: ARGS='--seed 8'.
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

# What training brings: drafters by objective, heads, and learning while serving. An hour and a half on two cores.
bench-drafters: $(STAMP)
	$(BIN)/python -m bench.drafters $(ARGS)

# The engine on an accelerator, where there is one, against its bandwidth.
bench-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu $(ARGS)

# The pages of docs/, in site/: links that lead nowhere are errors. (With --quiet they would be none.)
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Renders every overlay of deploy/ into build/manifests, and validates it.
manifests: $(STAMP)
	$(BIN)/python -m tests.deploy build/manifests

proto: $(STAMP)
	$(BIN)/python -m protos.generate

# The example client in TypeScript, from the protos; needs node and npm.
typescript:
	cd examples/typescript && npm install --no-audit --no-fund && npm run build

clean:
	rm -rf $(VENV) .tests-aside.log build mutants site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,gateway,ray,transformers,train,dev,bench,docs]'
	touch $@
