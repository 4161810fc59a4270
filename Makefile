# Everything runs in .venv, made on first use from the pins in requirements.txt. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off
export PIP_ROOT_USER_ACTION := ignore

.DELETE_ON_ERROR:
.PHONY: help $(VENV) demo test lint types pytest bench clean

help:
	@echo "make demo    two ranks on this machine: examples/demo.py"
	@echo "make test    lint, types and pytest; all that CI runs (PYTEST_FLAGS='-k heap' narrows pytest)"
	@echo "make lint    ruff check and ruff format --check"
	@echo "make types   mypy"
	@echo "make bench   the benchmark suite"
	@echo "make clean   delete caches and build outputs; $(VENV) stays"

$(VENV): $(STAMP)

# The pins already hold the build tool, so the project itself is installed without asking an index for anything.
$(STAMP): requirements.txt pyproject.toml setup.py
	@set -e; if ! [ -x $(BIN)/pip ]; then \
	  for python in $(PYTHON) python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "creating $(VENV) with $$python"; exec $$python -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "neither $(PYTHON) nor python3.11 is Python 3.11 or newer; install one or set PYTHON=..." >&2; exit 1; \
	fi
	@echo "installing requirements.txt into $(VENV)"
	@$(BIN)/python -m pip install --quiet -r requirements.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	  $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/demo.py

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy src

# Three at a time, as many tests wait or sleep; each takes about as long.
FIRST := tests/conformance/ tests/regressions/
SECOND := tests/unit/ tests/integration/ tests/gpu/
OTHERS := $(filter-out tests/__pycache__/ $(FIRST) $(SECOND),$(wildcard tests/*/))

pytest: $(STAMP)
ifeq ($(strip $(PYTEST_FLAGS)),)
	@logs=$$(mktemp -d); status=0; \
	  $(BIN)/python -m pytest $(FIRST) >$$logs/first 2>&1 & first=$$!; \
	  $(BIN)/python -m pytest $(SECOND) >$$logs/second 2>&1 & second=$$!; \
	  $(BIN)/python -m pytest $(OTHERS) || status=1; \
	  wait $$first || status=1; wait $$second || status=1; \
	  cat $$logs/*; rm -r $$logs; exit $$status
else
	$(BIN)/python -m pytest $(PYTEST_FLAGS)
endif

bench: $(STAMP)
	$(BIN)/python -m iris_pg.bench

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
