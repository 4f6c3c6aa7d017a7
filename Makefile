# The developer interface. `make` alone lists it; Python (3.11 or newer) is all that must be there, uv is used if found.
#   make cluster CONFIG=experiments/fashion.yaml ARGS="train.steps=200 -n 4"        PYTHON=python3.12 make cluster
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)
# `make cluster train.steps=20`: a setting given to make itself is one of ours, if it is spelled like one.
ARGS   ?= $(filter seed=% name=% workload=%,$(MAKEOVERRIDES)) \
	$(foreach set,$(MAKEOVERRIDES),$(if $(findstring .,$(firstword $(subst =, ,$(set)))),$(set)))
RUN    := $(VENV)/.ready-run
DEV    := $(VENV)/.ready-dev

.DEFAULT_GOAL := help
.PHONY: help setup cluster ps worker experiment test test-all sim chaos recovery soak bench growth steps check fmt clean

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV) ## install everything into .venv, for use and for development

# `exec` makes the process of a recipe the launcher itself, so that signals to it are not lost in a shell.
cluster: $(RUN) ## train on this machine: [CONFIG=file.yaml] [ARGS="key=value ... -n 4 --resume latest"]
	@exec $(BIN)/python -m gradbus cluster $(CONFIG) $(ARGS)

ps: $(RUN) ## the parameter server alone; it prints the line that adds a worker: [CONFIG=...] [ARGS="..."]
	@exec $(BIN)/python -m gradbus ps $(CONFIG) $(ARGS)

worker: $(RUN) ## a worker for it: PS=tcp://host:port [ARGS="--name N"]
	@exec $(BIN)/python -m gradbus worker --ps $(or $(PS),$(error write: make worker PS=tcp://host:port)) $(ARGS)

experiment: $(RUN) ## train an experiment of experiments/: E=name [ARGS="..."]
	@exec $(BIN)/python -m gradbus cluster experiments/$(or $(E),$(error write: make experiment E=name)).yaml $(ARGS)

test: $(DEV) ## quick tests: units, numbers, simulation
	@exec $(BIN)/python -m pytest -q

test-all: $(DEV) ## and those with real processes and sockets
	@exec $(BIN)/python -m pytest -q tests

sim: $(DEV) ## thousands of simulated clusters with faults: [ARGS="--schedules 10000 --replay SEED"]
	@exec $(BIN)/python scripts/sim.py $(ARGS)

chaos: $(DEV) ## a real cluster under random kills: [CONFIG=file.yaml] [ARGS="train.steps=3000 --kills 30 --seed 0"]
	@exec $(BIN)/python scripts/chaos.py $(CONFIG) $(ARGS)

recovery: $(DEV) ## how long a run takes to get over kills, stops, late and slow workers: [ARGS="--trials 10"]
	@exec $(BIN)/python scripts/recovery.py $(ARGS)

bench: $(RUN) ## time a synchronous round beside other libraries: [ARGS="--workers 4 --sizes 4KB,45MB --json FILE"]
	@exec $(BIN)/python scripts/bench.py $(ARGS)

growth: $(RUN) ## how PS time and memory grow with workers and parameters: [ARGS="--optimizer adam"]
	@exec $(BIN)/python scripts/growth.py $(ARGS)

steps: $(RUN) ## whole steps: the bus's share, and what a second worker adds: [ARGS="--experiments digits"]
	@exec $(BIN)/python scripts/steps.py $(ARGS)

soak: $(DEV) ## a long run with a kill every 15 s: does memory grow? [ARGS="--minutes 60"]
	@exec $(BIN)/python scripts/soak.py $(ARGS)

check: $(DEV) ## format, lint and types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: $(DEV) ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

ifdef UV
INSTALL = $(UV) venv -q --allow-existing --python $(PYTHON) $(VENV) && \
	$(UV) pip install -q --python $(BIN)/python -c constraints.txt
else
INSTALL = { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) is missing or older than 3.11; write: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }; } && \
	{ $(PYTHON) -m venv $(VENV) || \
	{ echo "venv does not work with $(PYTHON): apt-get install python3-venv, or install uv"; exit 1; }; } && \
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
endif

$(RUN): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once; about a minute)"
	@$(INSTALL) -e '.[tb,data]'
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@echo "installing into $(VENV), with development tools (once; about a minute)"
	@$(INSTALL) -e '.[tb,data,dev]'
	@touch $@ $(RUN)
