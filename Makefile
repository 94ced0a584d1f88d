# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

VENV    := .venv
BIN     := $(VENV)/bin
# What gets installed: the checkout itself, editable (source), or the wheel that is built from it (wheel). Exported or
# given to one command; the other one is installed in its place.
FROM    ?= source
# An unknown value is an error.
STAMP   := $(if $(filter-out source wheel,$(FROM)),$(error FROM is "$(FROM)"; allowed: source, wheel))$(if $(filter wheel,$(FROM)),$(VENV)/.installed-wheel,$(VENV)/.installed)
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS  := [agl,dev,docs]
PACKAGE := pyproject.toml constraints.txt README.md LICENSE $(shell find src -type f -not -name '*.pyc')
# The wheel is built from the unpacked sdist: so the sdist is whole.
BUILD   := rm -rf dist && $(BIN)/python -m build --no-isolation --quiet --outdir dist
# Other supported versions are unpacked beside the environment and put before it on the path: verl 0.7.1 and 0.8.0, and
# agentlightning 1.0.0 to 1.0.2, have the same dependencies, and a second full environment costs 5.7 GB.
OVERLAY := .overlays
# Neighbours stay in one process, with what they share: module fixtures, uninterrupted runs.
PYTEST  := $(BIN)/python -m pytest -n 2 --dist worksteal
ARGS    ?=
# OpenRLHF's wheels are for Python 3.11 only, so it has an environment of its own, without its GPU packages.
ORLHF   := .venv-openrlhf
ORLHF_PIP := $(ORLHF)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-openrlhf.txt
ORLHF_PYTEST := $(ORLHF)/bin/python -m pytest -m openrlhf tests/openrlhf

.DEFAULT_GOAL := help
.PHONY: help install build demo test test-slow test-ray test-faults yardstick soak soak-demo test-matrix test-oldest test-openrlhf golden bench lint types docs format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make the Python 3.12 environment in .venv  [FROM=wheel]

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.$(EXTRAS)'
	@rm -f $(VENV)/.installed-wheel
	@touch $@
	@echo "==> $(VENV) is ready"

$(VENV)/.installed-wheel: $(PACKAGE) | $(BIN)/python
	@$(PIP) build hatchling
	@$(BUILD)
	@$(PIP) "$$(echo dist/*.whl)$(EXTRAS)"
	@$(PIP) --force-reinstall --no-deps dist/*.whl # the same version may be there, of other content
	@rm -f $(VENV)/.installed
	@touch $@
	@echo "==> $(VENV) is ready, with $$(echo dist/*.whl)"

$(BIN)/python:
	@echo "==> creating $(VENV) from pinned versions (Python 3.12; 3 to 6 minutes, 6 GB, once)"
	@python="$$(scripts/find_python.sh)" && "$$python" -m venv $(VENV)

build: install ## build a wheel and an sdist in dist
	@$(BUILD)
	@ls dist/*

demo: install ## train on CPU, kill -9, resume, compare with the uninterrupted run  [ARGS=--stock, ARGS=--help]
	@$(BIN)/python examples/cpu_training/demo.py $(ARGS)

test: install ## run the default test suite  [ARGS="-k name"]
	@echo "==> tests (verl and agentlightning as pinned in constraints.txt)"
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: install ## run the tests that need many processes
	@echo "==> slow tests"
	@$(PYTEST) -m "slow and not faults and not ray" $(ARGS)

test-ray: install ## run the tests that need real Ray, one at a time
	@echo "==> tests with Ray"
	@$(BIN)/python -m pytest -m ray $(ARGS)

test-faults: install ## kill, refuse and cut off saves at every system call; needs strace, better as root with xfsprogs
	@echo "==> fault suite"
	@$(PYTEST) -m faults tests/faults $(ARGS)

yardstick: install ## compare N drawn scenes with what the trainer alone trains  [N=100 SEED=7]
	@$(BIN)/python -W ignore -m tests.yardstick.campaign $(or $(N),100) $(if $(SEED),--seed $(SEED))

soak: install ## kill -9 the rig N times at random moments, resume, compare  [N=1000 SEED=7]
	@$(BIN)/python -W ignore -m tests.rig.kill_campaign $(or $(N),1000) $(if $(SEED),--seed $(SEED))

soak-demo: install ## kill -9 the demo's training KILLS times at random moments, resume, compare  [KILLS=3 SEED=7]
	@$(BIN)/python examples/cpu_training/demo.py --kills $(or $(KILLS),3) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-oldest: install $(OVERLAY)/verl-0.7.1 $(OVERLAY)/agentlightning-1.0.0 ## run what touches a framework on the oldest supported versions
	@echo "==> tests with verl 0.7.1, agentlightning 1.0.0"
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/verl-0.7.1:$(CURDIR)/$(OVERLAY)/agentlightning-1.0.0 \
		$(PYTEST) -m "not slow" -k "not sequential" $$(scripts/framework_tests.sh) $(ARGS)

test-openrlhf: ## run the tests for OpenRLHF in .venv-openrlhf; skipped where there is no Python 3.11
	@if ! test -x $(ORLHF)/bin/python && ! scripts/find_python.sh 3.11 >/dev/null 2>&1; then \
		echo "==> tests for OpenRLHF skipped: its wheels need a Python 3.11 with venv, and there is none"; \
	else $(MAKE) --no-print-directory run-test-openrlhf; fi

.PHONY: run-test-openrlhf
run-test-openrlhf: $(ORLHF)/.installed | $(OVERLAY)/openrlhf-0.11.0 $(OVERLAY)/openrlhf-0.11.1
	@echo "==> tests with openrlhf 0.11.2"
	@$(ORLHF_PYTEST) $(ARGS)
	@echo "==> tests with openrlhf 0.11.0"
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/openrlhf-0.11.0 $(ORLHF_PYTEST) --deselect tests/openrlhf/test_client_state.py $(ARGS)
	@echo "==> contracts of openrlhf 0.11.1"
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/openrlhf-0.11.1 $(ORLHF_PYTEST)/test_contracts.py

$(ORLHF)/.installed: pyproject.toml constraints-openrlhf.txt
	@echo "==> creating $(ORLHF) from pinned versions (Python 3.11; 1 to 3 minutes, 2 GB, once)"
	@test -x $(ORLHF)/bin/python || { python="$$(scripts/find_python.sh 3.11)" && "$$python" -m venv $(ORLHF); }
	@$(ORLHF_PIP) torch==2.13.0 # by its version first: a range would take a newer build for GPUs
	@$(ORLHF_PIP) 'ray[default]' torchdata transformers datasets accelerate peft aiohttp pillow pylatexenc pytest pytest-timeout -e .
	@$(ORLHF_PIP) --no-deps openrlhf==0.11.2
	@touch $@

test-matrix: test test-oldest $(OVERLAY)/verl-0.7.1 $(OVERLAY)/agentlightning-1.0.0 ## run the default suite on every pair of supported versions
	@echo "==> tests with verl 0.7.1, agentlightning 1.0.2"
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/verl-0.7.1 $(PYTEST) -m "not slow" $(ARGS)
	@echo "==> tests with verl 0.8.0, agentlightning 1.0.0"
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/agentlightning-1.0.0 $(PYTEST) -m "not slow" $(ARGS)

$(OVERLAY)/verl-%: | install
	@echo "==> unpacking verl $* into $@"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ verl==$*

$(OVERLAY)/openrlhf-%: | $(ORLHF)/.installed
	@echo "==> unpacking openrlhf $* into $@"
	@$(ORLHF_PIP) --no-deps --target $@ openrlhf==$*

$(OVERLAY)/agentlightning-%: | install
	@echo "==> unpacking agentlightning $* into $@"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ agentlightning==$*

golden: install $(OVERLAY)/numpy-2.2.6 ## write the golden files of a new format version, under numpy 1 and numpy 2
	@$(BIN)/python -m tests.golden.sample
	@PYTHONPATH=$(CURDIR)/$(OVERLAY)/numpy-2.2.6 $(BIN)/python -m tests.golden.sample

$(OVERLAY)/numpy-%: | install
	@echo "==> unpacking numpy $* into $@"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ numpy==$*

bench: install ## measure what the extension costs, against goals; needs an idle machine  [ARGS="saving --quick"]
	@$(BIN)/python -W ignore -m bench $(ARGS)

lint: install ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install ## check types
	@$(BIN)/pyright

docs: install ## build the documentation, strictly
	@$(BIN)/python scripts/draw_figures.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "==> site/index.html"

format: install ## format the code
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

clean: ## remove what the targets above made
	rm -rf $(VENV) $(ORLHF) $(OVERLAY) site build dist .pytest_cache .ruff_cache .hypothesis examples/cpu_training/runs
