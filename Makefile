# Each target prepares .venv by itself. Extra pytest options: make test PYTEST_ARGS="-m 'not slow'"
PYTHON      ?= python3
PYTEST_ARGS ?=
WORKERS     ?= 2

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check install -q --progress-bar off -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo paper paper-smoke bench test lint format types wheel ci clean

help:
	@echo "targets: demo paper paper-smoke bench test lint format types wheel ci clean"

$(VENV)/.stamp-venv:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes in alone and at its exact version, so that no later request can pick another build of it.
$(VENV)/.stamp-torch: constraints.txt $(VENV)/.stamp-venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
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

# One thread per worker: the workers already fill the cores.
test: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.stamp-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(VENV)/.stamp-dev
	$(PY) -m mypy --strict src

wheel: $(VENV)/.stamp-dev
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) .ci/check_wheel.py dist

ci: lint types test wheel

clean:
	rm -rf $(VENV) dist demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis
