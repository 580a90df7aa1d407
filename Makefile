# Everything runs in .venv, which the first target you call creates from constraints.txt.
#   make demo            PYTHON=python3.12 make test            make test ONLY=samplers ARGS="-k resume"

PYTHON ?= python3
JOBS ?= auto
ARGS ?=
ONLY ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test trainers cluster browser dist check lint types architecture docs docs-index bench \
    bench-cluster bench-peers bench-remote bench-scale soak clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

# torch comes first and alone: the installer then takes the build that suits the machine, and
# setuptools, which the second line builds with, comes with it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "energon_lite needs Python 3.10 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV); this takes some minutes the first time"
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

install: $(INSTALLED) ## Create .venv and install everything, pinned

demo: $(INSTALLED) ## Draw data, train, save in mid-epoch, resume with other workers
	$(BIN)/python examples/train_resume.py $(ARGS)

# `make check` runs tests/architecture.
test: $(INSTALLED) ## Run the tests
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses=8 --dist=worksteal --benchmark-disable \
	    $(or $(addprefix tests/,$(ONLY)),--ignore=tests/architecture) $(ARGS)

# The real trainers want other versions of some packages than constraints.txt has.
TRAINERS := .venv-trainers
TRAINERS_INSTALL := $(TRAINERS)/bin/python -m pip install --disable-pip-version-check --quiet \
    -c constraints-trainers.txt

$(TRAINERS)/.installed: pyproject.toml constraints-trainers.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "The trainers' packages need Python 3.11 or newer: make trainers PYTHON=python3.12"; \
	    exit 1; }
	$(PYTHON) -m venv $(TRAINERS)
	@echo "Installing the trainers into $(TRAINERS), 2 GB; this takes some minutes the first time"
	$(TRAINERS_INSTALL) torch==2.13.0 setuptools
	$(TRAINERS_INSTALL) --no-build-isolation -e '.[trainers]'
	@touch $@

trainers: $(TRAINERS)/.installed ## Run the tests with the real trainers (Lightning, HF, ...)
	$(TRAINERS)/bin/python -m pytest tests/trainers $(ARGS)

# Ray is large, and tests of a cluster take minutes: they have an environment of their own.
CLUSTER := .venv-cluster
CLUSTER_INSTALL := $(CLUSTER)/bin/python -m pip install --disable-pip-version-check --quiet \
    -c constraints.txt

$(CLUSTER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTER)
	@echo "Installing Ray into $(CLUSTER); this takes some minutes the first time"
	$(CLUSTER_INSTALL) torch==2.13.0 setuptools
	$(CLUSTER_INSTALL) --no-build-isolation -e '.[dev,ray]' 'ray[train]'
	@touch $@

cluster: $(CLUSTER)/.installed ## Run the tests of loading on a Ray cluster
	$(CLUSTER)/bin/python -m pytest tests/cluster -p no:xdist --benchmark-disable $(ARGS)

# Chromium comes from the system: `apt install chromium`, or `.venv/bin/playwright install chromium`.
browser: $(INSTALLED) ## Run the tests of the preview page in Chromium
	$(PIP_INSTALL) -e '.[browser]'
	$(BIN)/python -m pytest tests/preview -k browser -p no:xdist --benchmark-disable -rs $(ARGS)

# Each distribution goes into an empty environment, with its dependencies and nothing else.
dist: $(INSTALLED) ## Build wheel and sdist, install each into an empty environment
	rm -rf dist build
	$(PIP_INSTALL) build
	$(BIN)/python -m build --no-isolation --outdir dist .
	for file in dist/*.whl dist/*.tar.gz; do \
	    rm -rf dist/env && $(PYTHON) -m venv dist/env \
	    && dist/env/bin/pip install --disable-pip-version-check --quiet torch==2.13.0 $$file \
	    && (cd dist && env/bin/energon-lite --version \
	        && env/bin/python -c 'from energon_lite import get_train_dataset') || exit 1; \
	done; rm -rf dist/env

check: lint types architecture ## ruff, mypy --strict, layers and documents

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check energon_lite tests benchmarks examples

types: $(INSTALLED)
	$(BIN)/mypy --strict

architecture: $(INSTALLED)
	$(BIN)/python -m pytest tests/architecture -q --benchmark-disable
	@$(BIN)/python -m tests.architecture.code_size

docs-index: $(INSTALLED) ## Write docs/modules.md from the docstrings
	$(BIN)/python -m tests.architecture.module_index

# The pages as they lie in the project, so that links between its folders hold; strict: a broken one fails.
DOCS := .venv-docs
PAGES := README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs benchmarks/README.md metadatasets examples

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --disable-pip-version-check --quiet -c constraints.txt \
	    mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

docs: $(DOCS)/.installed ## Build the documentation as a site, in .site/html
	rm -rf .site && mkdir -p .site/pages
	cp --parents -r $(PAGES) .site/pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

bench: $(INSTALLED) ## Measure speed, as ratios to hand-written loops
	$(BIN)/python -m pytest benchmarks -p no:xdist $(ARGS)

bench-peers: ## Measure other loaders beside ours, each in an environment made for it
	$(PYTHON) -m benchmarks.peers $(ARGS)

bench-remote: $(INSTALLED) ## Measure reading from an object store, of a server on this machine
	$(BIN)/python -m benchmarks.remote $(ARGS)

bench-cluster: $(CLUSTER)/.installed ## Measure loading on a Ray cluster of two nodes on this machine
	$(CLUSTER)/bin/python -m benchmarks.cluster $(ARGS)

bench-scale: $(INSTALLED) ## Measure how costs grow with ranks, streams, sources and buffers
	$(BIN)/python -m benchmarks.scale $(ARGS)

# Some tests take long, and a watchdog that prints the frames of a busy thread may crash Python.
SOAK := HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --benchmark-disable -o faulthandler_timeout=0

# Tests that kill processes or measure memory need a quiet machine: they run last, one by one.
soak: $(INSTALLED) ## Run every property with a thousand examples, and the long tests
	$(SOAK) -m "(hypothesis or soak) and not (soak and processes)" -n $(JOBS) --maxprocesses=8 \
	    --dist=worksteal $(ARGS)
	$(SOAK) -m "soak and processes" -p no:xdist $(ARGS)
	$(BIN)/python -m benchmarks.scale

clean: ## Remove .venv and its like, caches and the demo's data
	rm -rf $(VENV) $(TRAINERS) $(CLUSTER) .venv-peers $(DOCS) .site demo_data build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
