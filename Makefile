# `make <target> PY=python3` uses an environment you already have and installs nothing.
ifndef PY
PY := .venv/bin/python
BIN := .venv/bin/
RUN := .venv/.run
DEV := .venv/.dev
endif

JOBS ?= 2
WHOLE := .[models,train,report]
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
PYTEST := $(PY) -m pytest --no-header
# Bytecode is written even where the environment forbids it, because a run starts a hundred processes with the same imports.
PARALLEL := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTEST) -n $(JOBS) --dist worksteal
INTERPRETED := TRITON_INTERPRET=1 SOFTLESS_TYPECHECK=0
# What a change breaks first: the forms of every mechanism, causality, nn.Attention and the rules of the house.
QUICK := tests/laws/test_forms.py tests/laws/test_causality.py tests/nn/test_attention.py tests/house/test_house.py tests/house/test_pages.py

.DEFAULT_GOAL := help
.PHONY: help setup check quick test slow gpu timm-conformance bench study docs dist clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F '|' '{ printf "%-25s%s\n", $$1, $$2 }'

setup: $(DEV) ## install softless and its tools into .venv

check: $(DEV) ## format, lint, types and import layers
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(BIN)lint-imports --no-logo

quick: $(DEV) ## the tests that a change is most likely to break: less than a minute
	$(PARALLEL) --hypothesis-profile mutants -m "not slow and not gpu and not compile and not kernels" $(QUICK)

test: $(DEV) ## every test that needs no GPU: about 15 minutes on 2 cores
	@$(PY) tests/conformance/run.py --fetch || echo "timm's own tests on our models are skipped, because its sdist could not be downloaded."
	$(PARALLEL) --timeout 300 -m "not slow and not gpu and not compile and not kernels"
	$(INTERPRETED) $(PARALLEL) --timeout 300 -m "kernels and not slow and not gpu" tests/kernels
	SOFTLESS_TYPECHECK=0 $(PARALLEL) --timeout 300 -m "compile and not slow and not gpu"

slow: $(DEV) ## every case of every test, many more random ones, mutants and reruns: hours
	$(PARALLEL) --hypothesis-profile slow -m "not gpu and not compile and not kernels"
	$(INTERPRETED) $(PARALLEL) --hypothesis-profile slow -m "kernels and not gpu" tests/kernels
	SOFTLESS_TYPECHECK=0 $(PYTEST) --hypothesis-profile slow -m "compile and not gpu"
	$(PY) tests/meta/mutants.py --jobs $(JOBS)
	$(PY) tests/meta/flakes.py --jobs $(JOBS)

gpu: $(DEV) ## tests and benchmarks that need a CUDA device
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu needs a CUDA device, and torch finds none.")'
	@SOFTLESS_TYPECHECK=0 $(PYTEST) -m gpu; tested=$$?; $(PY) benchmarks/gpu.py && exit $$tested

timm-conformance: $(DEV) ## timm's own model tests on our models; ARGS="-k swin_tiny" selects some
	$(PY) tests/conformance/run.py $(ARGS)

bench: $(RUN) ## time the mechanisms on this CPU
	$(PY) benchmarks/cpu.py

study: $(RUN) ## do you need the softmax? Trains, writes report/index.html; ARGS="--help" lists options
	$(BIN)softless study $(ARGS)

docs: $(DEV) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

dist: $(DEV) ## build the wheel and the sdist into dist/
	rm -rf dist
	$(PY) -m build --no-isolation

clean: ## remove everything that was built, except .venv
	rm -rf build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find softless tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/bin/python:
	@for python in python3.11 python3.12 python3.13 python3; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		echo "Making .venv with $$($$python --version)"; \
		$$python -m venv .venv && exit 0; \
		rm -rf .venv; exit 1; \
	done; \
	echo "softless needs Python 3.11 or newer: install one, as python3.11, python3.12, python3.13 or python3." >&2; exit 1

# uv takes half as long as pip, but ignores pip's settings: if it fails, pip installs. Its list of packages is not shown.
# The stamp file tells whether uv succeeded, because not every shell has pipefail.
define install
	@echo "Installing $(1) into .venv; PyTorch makes the first time take minutes"
	@rm -f $@
	@{ $(PIP) --quiet uv && $(PY) -m uv pip install --python $(PY) -c constraints.txt -e '$(1)' && touch $@; } 2>&1 | sed '/^ [-+~] /d'
	@test -e $@ || { echo "uv failed (see above); trying pip."; $(PIP) --no-compile -e '$(1)' && touch $@; }
endef

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,$(WHOLE))

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,.[dev])
	@touch .venv/.run
