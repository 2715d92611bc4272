# SPDX-License-Identifier: Apache-2.0
# Everything runs in ./.venv, which is made on first use and made complete after an interruption.
#   make pretrain [ARGS="--train-iters 20"]   train a small GPT on two CPU ranks
#   make lint                                 ruff and mypy
#   make test [ARGS="-k layout"]              the tests, in a few minutes
#   make test-all                             these and what is long by nature: every combination

# The newest of the Pythons that torch is tested with here; PYTHON=/path/to/python overrides the search.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13 python3.10,$(shell \
	command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& command -v $(name))))
# On its own and first: it is by far the largest part, and a machine with a GPU may name another build of 2.10 to 2.13 here.
TORCH ?= torch==2.13.0
ARGS ?=
# Two processes share the test files: while one waits for its ranks or for the disk, the other works.
PYTEST = .venv/bin/python -m pytest --numprocesses 2 --dist loadfile

.PHONY: pretrain lint test test-all clean
.DELETE_ON_ERROR:

pretrain: .venv/.installed
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash examples/megatron_fsdp/pretrain_gpt_laptop.sh $(ARGS)

test: .venv/.installed
	$(PYTEST) -m "not exhaustive" $(ARGS)

test-all: test
	$(PYTEST) -m exhaustive $(ARGS)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/.installed: setup.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 or newer with the venv module found. Install python3.11 (on Debian also" \
		"python3.11-venv), or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check --quiet "$(TORCH)"
	.venv/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[test,lint,plot]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache build *.egg-info
