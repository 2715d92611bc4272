# SPDX-License-Identifier: Apache-2.0
# Everything runs in ./.venv, which is made on first use and made complete after an interruption.
#   make pretrain [ARGS="--train-iters 20"]   train a small GPT on two CPU ranks
#   make lint                                 ruff and mypy
#   make test [ARGS="-k layout"]              the tests, in a few minutes
#   make test-all                             these and what is long by nature, in one run: every combination
#   make gpu-check [ARGS=--rehearse]          the checks of a first day on GPUs, and a report; or the same on CPU ranks
#   make docs                                 the documentation site, in build/site
#   make test-oldest, make test-newest        the tests with the oldest and the newest torch (and Megatron-Core)
#   make test TORCH=torch==2.14.1 MEGATRON=0.18.2   with another torch, in an environment of its own, and with another
#                                             release of Megatron-Core, which pip downloads once

# The newest of the Pythons that torch is tested with here; PYTHON=/path/to/python overrides the search.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13 python3.10,$(shell \
	command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& command -v $(name))))
# On its own and first: it is by far the largest part. Another build of 2.10 to 2.15, also one for GPUs, gets its own folder.
USUAL_TORCH = torch==2.13.0
TORCH ?= $(USUAL_TORCH)
VENV = .venv$(if $(filter-out $(USUAL_TORCH),$(TORCH)),-$(subst /,-,$(subst ==,-,$(TORCH))))
# A release of Megatron-Core to put before the installed one, unpacked in build/megatron_core.
MEGATRON ?=
ARGS ?=
# Two processes share the test files: while one waits for its ranks or for the disk, the other works.
WITH_RELEASE = $(if $(MEGATRON),variables=$$($(VENV)/bin/python -m tests.support.megatron_release $(MEGATRON)) && eval "$$variables" &&)
PYTEST = $(WITH_RELEASE) $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Tests start Python by the dozen with sources that pip has not compiled: other releases, and these.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: pretrain lint test test-all test-oldest test-newest gpu-check docs clean
.DELETE_ON_ERROR:

pretrain: $(VENV)/.installed
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/megatron_fsdp/pretrain_gpt_laptop.sh $(ARGS)

test: $(VENV)/.installed
	$(PYTEST) -m "not exhaustive" $(ARGS)

test-all: $(VENV)/.installed
	$(PYTEST) $(ARGS)

test-oldest:
	$(MAKE) test TORCH=torch==2.10.0

test-newest:
	$(MAKE) test TORCH=torch==2.15.0 MEGATRON=0.19.2

gpu-check: $(VENV)/.installed
	$(WITH_RELEASE) $(VENV)/bin/python -m tests.gpu.check $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet
	@echo "make: the site is build/site/index.html"

$(VENV)/.documented: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[docs]"
	touch $@

$(VENV)/.installed: setup.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 or newer with the venv module found. Install python3.11 (on Debian also" \
		"python3.11-venv), or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[test,lint,plot]"
	@# Imported by newer releases of Megatron-Core. Only tests on these see it: with triton torch would compile kernels for them.
	@# A build of torch for GPUs brings the triton that it works with.
	@missing=$$($(VENV)/bin/python -c 'import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))' triton pybind11 six); \
	test -z "$$missing" || $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(VENV)/for_releases $$missing \
		|| echo "make: $$missing: not installed: tests on other releases of Megatron-Core will be skipped" >&2
	touch $@

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache build *.egg-info
