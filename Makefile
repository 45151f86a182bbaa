# Each target prepares .venv by itself. Extra pytest options: make test PYTEST_ARGS="tests/pruning -x"
# Another version of torch: make test TORCH=2.15.0 (an environment of its own; such builds can take gigabytes).
PYTHON      ?= python3
PYTEST_ARGS ?=
WORKERS     ?= 2
TORCH       ?=

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
PY   := $(VENV)/bin/python
# The constraints fix the version of torch, so they are left out where another one is asked for.
PIP  := $(PY) -m pip --disable-pip-version-check install -q --progress-bar off $(if $(TORCH),,-c constraints.txt)
# One thread per worker: the workers already fill the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
NAME ?= --help
.PHONY: help demo paper paper-smoke bench test test-fast lint format types docs wheel ci clean

help:
	@echo "demo       prune a small network on embedded data; results in demo-out/"
	@echo "test       all tests and doctests, with line coverage (make test TORCH=X.Y.Z: another torch)"
	@echo "test-fast  the tests that take no more than about a second each"
	@echo "lint types docs wheel    ruff; mypy --strict; the site in site/; the package, built and tried"
	@echo "ci         lint, types, docs, test and wheel"
	@echo "paper      the figures of the paper (minutes to hours; an interrupted run goes on)"
	@echo "paper-smoke, bench NAME=...    every figure in seconds; one benchmark"
	@echo "format clean"

$(VENV)/.stamp-venv:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes in alone and at its exact version, so that no later request can pick another build of it.
$(VENV)/.stamp-torch: constraints.txt $(VENV)/.stamp-venv
	$(PIP) "$(if $(TORCH),torch==$(TORCH),$$(grep '^torch==' constraints.txt))"
	@touch $@

$(VENV)/.stamp-plot: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	$(PIP) -e '.[plot]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.stamp-plot
	$(PY) -m fishleg.cli.demo --out demo-out

# The paper's figures: minutes for the toy problems, hours for ResNet18. FISHLEG_DATA names the directory of its
# datasets; they are downloaded to ./data otherwise. An interrupted run goes on where it stopped.
paper: $(VENV)/.stamp-dev
	for figure in init estimation ablation claims layer; do \
	  $(PY) -m reproduction figure $$figure --out paper-out || exit 1; done
	for dataset in cifar10 tiny-imagenet; do \
	  $(PY) -m reproduction resnet18 $$dataset --out paper-out || exit 1; done

# Every figure in a version of seconds, and every table and picture of the documents compared with the results.
paper-smoke: $(VENV)/.stamp-dev
	for figure in init estimation ablation claims layer unstructured semi_structured; do \
	  OMP_NUM_THREADS=1 $(PY) -m reproduction figure $$figure --smoke --out paper-out/smoke || exit 1; done
	$(PY) -m reproduction tables --check

# One benchmark by name: make bench NAME=resnet20-oneshot (python -m reproduction bench --help lists them).
bench: $(VENV)/.stamp-dev
	$(PY) -m reproduction bench $(NAME)

test: $(VENV)/.stamp-dev
	$(PYTEST) --cov --cov-report=term $(PYTEST_ARGS)
	$(PY) -m pytest --doctest-modules src/fishleg -p no:cacheprovider

test-fast: $(VENV)/.stamp-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.stamp-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(VENV)/.stamp-dev
	$(PY) -m mypy --strict src

docs: $(VENV)/.stamp-dev
	$(PY) docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir site

wheel: $(VENV)/.stamp-dev
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) .ci/check_wheel.py dist

ci: lint types docs test wheel

clean:
	rm -rf .venv .venv-torch-* dist site demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
