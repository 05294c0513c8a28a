# Everything here sets up what it needs in .venv first. A target's comment stands right above it: `make help` prints it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
RUN := $(BIN)/python

# tests start some sixty processes, each of which would compile the package's sources
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint types suite suite-avx2 smoke test-lowest test-newest test-all coverage docs gallery scaling
.PHONY: mutations bench readme package release-check check-arm check-amx predict gpu-check test-gpu-image gpu gpu-pack clean

help:
	@awk '/^# / {about = about substr($$0, 2); next} /^[a-z0-9-]+:/ && about {printf "%-14s%s\n", $$1, about} {about = ""}' Makefile

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cli: pyproject.toml | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -c constraints.txt -e '.[cli,plot]'
	touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -e '.[lint]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.package: pyproject.toml | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -e '.[package]'
	touch $@

$(VENV)/.coverage: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -c constraints.txt -e '.[test,coverage]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(RUN) -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# attention of a saved layer, checked, and a picture of its weights, in build
demo: $(VENV)/.cli
	mkdir -p build
	$(BIN)/speedlight attend examples/minilm-layer3.safetensors --check -o build/demo.safetensors
	$(BIN)/speedlight view examples/minilm-layer3.safetensors --head 0 --head 3 --head 7 --span 0:42 \
		--labels examples/minilm-tokens.txt -o build/demo.png

# ruff: rules and format
lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# pyright
types: $(VENV)/.test
	$(BIN)/pyright

# the tests of every change, without lint and types
suite: $(VENV)/.test
	$(RUN) -m pytest -n auto -m "not slow"

# lint, and types beside the suite
test: lint $(VENV)/.test
	mkdir -p build
	$(BIN)/pyright >build/types.txt & types=$$!; $(RUN) -m pytest -n auto -m "not slow"; tests=$$?; \
		wait $$types; types=$$?; cat build/types.txt; exit $$((tests | types))

# the suite on a CPU without AVX-512, or as if it were one, and where SPEEDLIGHT_ISA=avx2 asks for that
suite-avx2: $(VENV)/.test
	SPEEDLIGHT_TEST_HIDE=avx512 $(RUN) -m pytest -n auto -m "not slow"; hidden=$$?; \
		SPEEDLIGHT_ISA=avx2 $(RUN) -m pytest -n auto -m "not slow"; exit $$((hidden | $$?))

SMOKE := tests/conformance/attention/test_attention.py tests/robustness/test_cache.py tests/robustness/test_llvm.py

# a few minutes of the suite, for a system that is new
smoke: $(VENV)/.test
	$(RUN) -m pytest -n auto -m "not slow" $(SMOKE) tests/robustness/test_systems.py

# with the lowest releases that pyproject.toml takes, in an environment of its own
test-lowest:
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install -q -c lowest.txt -e '.[test]'
	build/lowest/bin/python -m pytest -n auto -m "not slow" $(SMOKE) \
		tests/adapters/jax tests/adapters/flash_attn tests/adapters/torch

# adapters' tests with the newest releases that pip finds, in an environment of its own, without CUDA's gigabytes;
# needs a C compiler
test-newest:
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python tools/torch_without_cuda.py torch
	build/newest/bin/python -m pip install -q -U --upgrade-strategy eager -e '.[test]'
	build/newest/bin/python -m pytest -n auto -m "not slow" tests/adapters

# every test, also slow and long ones, after the site
test-all: $(VENV)/.test docs
	SPEEDLIGHT_FULL=1 $(RUN) -m pytest

TESTS ?= tests
# a signal in its own code would leave coverage locked
SIGNALS := tests/robustness/test_interrupts.py tests/robustness/test_signals.py

# lines of the package that no test of the short run reaches, file by file; of some tests: make coverage TESTS=tests/docs
coverage: $(VENV)/.coverage
	rm -rf build/coverage
	mkdir -p build/coverage
	$(RUN) -m coverage run -m pytest -n auto -m "not slow" $(SIGNALS:%=--ignore=%) $(TESTS); tests=$$?; \
		$(RUN) -m coverage combine -q && $(RUN) -m coverage report && exit $$tests

# the site, in build/site; any warning, and any link or anchor that leads nowhere, ends it
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

# docs/gallery/*.png, from the examples of docs/gallery.md
gallery: $(VENV)/.cli
	$(RUN) tools/gallery.py

# docs/pictures/scaling.png and the table of docs/scaling.md, from the model and benchmarks/results/ranks
scaling: $(VENV)/.cli
	$(RUN) tools/scaling.py

# does the suite see some hundred faults? Goes on where it was stopped; `python tests/mutations.py --only WORD` asks about one
mutations: $(VENV)/.test
	$(RUN) tests/mutations.py

# every row of benchmarks/results again, on this machine: half an hour or more
bench: $(VENV)/.bench
	$(RUN) benchmarks/run.py

# what llvm-mca predicts of kernels on Arm's CPUs, the table of docs/systems.md: needs LLVM 17 or later (Debian: llvm-19)
predict: $(VENV)/.cli
	$(RUN) benchmarks/predict.py

# tables and pictures of docs/benchmarks.md, docs/performance.md and the README, from the rows of benchmarks/results
readme: $(VENV)/.cli
	$(RUN) benchmarks/table.py

# a wheel and an sdist in dist/; each is checked, then attends in an environment that has nothing else
package: $(VENV)/.package
	rm -rf dist build/lib build/bdist.*
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	set -e; for file in dist/*; do $(PYTHON) -m venv --clear build/bare; bare=build/bare/$(notdir $(BIN)); \
		$$bare/python -m pip install -q $$file; (cd build && bare/$(notdir $(BIN))/python ../tests/bare.py); done

# a tag is the version everywhere, and what errors and the README say of installing is true once it is published
release-check:
	$(PYTHON) -c "import speedlight.errors as e, speedlight as s; assert e.PUBLISHED and '$(TAG)' == 'v' + s.__version__"
	grep -q '^version: $(TAG:v%=%)$$' CITATION.cff
	grep -q '^## $(TAG:v%=%)' CHANGELOG.md

# kernels for 64-bit Arm under qemu: needs gcc-aarch64-linux-gnu and qemu-user-static
check-arm: $(VENV)/.test
	$(RUN) tests/arm/calls.py

# tile registers against the same arithmetic by vectors: on a CPU with AMX
check-amx: $(VENV)/.test
	$(RUN) tests/amx/check.py

GPU_TESTS := $(filter-out tests/gpu/test_gpu_ahead.py,$(wildcard tests/*/test_gpu*.py tests/*/*/test_gpu*.py))

# with no GPU: its tests in Triton's interpreter, then every kernel of the tile table compiled for sm_80, sm_90 and sm_100
gpu-check: $(VENV)/.test
	TRITON_INTERPRET=1 $(RUN) -m pytest -n auto $(GPU_TESTS)
	$(RUN) tools/gpu_ahead.py

GPU_IMAGE := build/gpu-image/bin/python

# the GPU's tests, interpreted, with the releases of the machine with a GPU (gpu-image.txt), in an environment of its own:
# PYTHON is a Python 3.12; needs a C compiler, and 530 MB of PyTorch, but not CUDA
test-gpu-image:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info[:2] != (3, 12) and 'PYTHON: expected a Python 3.12')"
	$(PYTHON) -m venv build/gpu-image
	$(GPU_IMAGE) -m pip install -q -c gpu-image.txt -e . pytest pytest-xdist hypothesis
	$(GPU_IMAGE) tools/torch_without_cuda.py torch -c gpu-image.txt
	TRITON_INTERPRET=1 $(GPU_IMAGE) -m pytest -n auto $(GPU_TESTS)

BOX ?=
GPU_OUT ?= benchmarks/results/gpu
GPU_KERNELS ?= build/gpu-kernels.tar.gz

# on a GPU, with nothing installed here: PYTHON has PyTorch, Triton, pytest, Hypothesis and the packages of the core
# (pytest-xdist, if it is there, lets compilers run side by side; matplotlib draws). Three boxes of minutes, or
# BOX=one (problems, main rows), two (tiles, all rows) or three (tests); DRY=1: without a GPU, computing nothing
gpu:
	$(PYTHON) tools/gpu_report.py $(BOX) $(if $(DRY),--dry) --kernels $(GPU_KERNELS) -o $(GPU_OUT)

# without a GPU: the kernels of boxes one and two, compiled, in a file that travels to a machine with a GPU: PYTHON has
# the releases of that machine (gpu-image.txt), and the sources are the same there
gpu-pack:
	$(PYTHON) tools/gpu_report.py pack --kernels $(GPU_KERNELS) -o build/gpu-pack

# removes .venv and what was built
clean:
	rm -rf $(VENV) build dist *.egg-info
