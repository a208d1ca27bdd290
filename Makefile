# make demo    install everything, then compare torch.load with fastckpt.load
# make test    install everything, then run the tests       (ARGS="-k zip" is handed to pytest)
# make help    the other targets
#
# PYTHON=python3.12 VENV=.venv312   another interpreter, in a virtual environment of its own
# TORCH=2.4.1                       another torch

PYTHON ?= python3
VENV ?= .venv
# The torch that development and CI use: this line is the only place that names it.
TORCH ?= 2.13.0
ARGS ?=
# Processes that tests run in, at most; ARGS="-n 0" is one, which a debugger can stop.
JOBS ?= 4
PYTEST := -m pytest -n auto --maxprocesses $(JOBS)
# Of a fuzzer's run; the same number makes the same mutants.
MINUTES ?= 10
SEED ?= 0
TARGET ?= all

BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready-torch-$(TORCH)
# cython-lint starts pycodestyle by name
export PATH := $(abspath $(BIN)):$(PATH)

TARGETS := demo test test-slow sanitize sanitize-threads build lint format stubs dist fuzz fuzz-coverage bench bench-html \
    bench-check clean

.PHONY: help torch-version $(TARGETS)

help:
	@echo "$(TARGETS)"

demo: build
	$(PY) scripts/demo.py $(ARGS)

test: build
	$(PY) $(PYTEST) $(ARGS)

test-slow: build
	$(PY) $(PYTEST) -m "slow or network or large" $(ARGS)

# The tests, and a minute of the fuzzer, over native modules with address and undefined-behaviour sanitizers, compiled
# apart in build/sanitize. Left out are tests of files and builds, which compile without them.
sanitize: $(READY)
	$(PY) scripts/sanitize.py $(PYTEST) --ignore=tests/test_packaging.py --ignore=tests/test_vendoring.py \
	    --ignore=tests/test_asv.py $(ARGS)
	PYTHONPATH=tests $(PY) scripts/sanitize.py -m fuzz --minutes 1 --seed $(SEED)

# The tests of many threads over modules with the sanitizer of data races, which does not survive a fork. -s: it reports what
# it finds in tests that pass, too.
sanitize-threads: $(READY)
	$(PY) scripts/sanitize.py --threads -m pytest -s tests/test_hammer.py -k "not fork" $(ARGS)

build: $(READY)
	$(PY) -m fastckpt.build

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	cython-lint $$(find src -name '*.pyx' -o -name '*.pxd')

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

stubs: build
	$(PY) -m mypy.stubtest --ignore-disjoint-bases --ignore-unused-allowlist \
	    --allowlist scripts/stubtest-allow.txt $$($(PY) -m fastckpt.build --list)

dist: build
	rm -rf dist
	$(PY) -m build --outdir dist .
	$(PY) scripts/check_dist.py dist

# Mutated fixtures, read every way and compared with torch.load. Findings are saved in build/fuzz.
fuzz: build
	PYTHONPATH=tests $(PY) -m fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# The same led by coverage, MINUTES for each TARGET (zip, legacy, tar, pickle, load). Needs clang and atheris.
fuzz-coverage: build
	PYTHONPATH=src:tests $(PY) -m fuzz.covered --minutes $(MINUTES) --target $(TARGET)

# asv notes the machine in the home directory; this keeps all of it in asv_bench/.asv.
ASV := mkdir -p asv_bench/.asv && cd asv_bench && HOME=$(abspath asv_bench/.asv) $(abspath $(PY)) -m asv

# Minutes. ARGS="--bench Many" runs a part, ARGS="-a rounds=9" takes more samples.
bench: build
	$(ASV) machine --yes
	commit=$$(git rev-parse HEAD) && $(ASV) run -E existing --launch-method spawn --record-samples \
	    --set-commit-hash $$commit $(ARGS)
	$(PY) scripts/bench_table.py

# Pages of what was measured, which need no network once npm has fetched their libraries
bench-html: $(READY)
	$(ASV) publish
	$(PY) scripts/offline_html.py asv_bench/.asv/html

bench-check: build
	$(ASV) check -E existing

clean:
	rm -rf build dist src/*.egg-info
	find src \( -name '*.so' -o -name '_*.c' -o -name '*.pyc' \) -delete

torch-version:
	@echo $(TORCH)

$(PY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch stands in the same command, so that its extra cannot take another release.
$(READY): pyproject.toml setup.py | $(PY)
	rm -f $(VENV)/.ready-*
	$(PY) -m pip install --quiet "setuptools>=77" "Cython>=3.3"
	$(PY) -m pip install --quiet --no-build-isolation "torch==$(TORCH)" --editable ".[dev]"
	touch $@
