# Every target sets up .venv by itself the first time; the second time that costs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLING := echo "[2/2] installing Skipper and its packages into $(VENV), and compiling: some minutes the first time"
INSTALLED  := echo "      $(VENV) is ready"
SOURCES := $(shell find control dataplane -name '*.p[xy][xdi]' -o -name '*.h') setup.py pyproject.toml constraints.txt
# Those of jobs on several machines are make test-hosts, those of the wheel make test-dist.
TESTS  ?= tests --ignore=tests/hosts --ignore=tests/jobs --ignore=tests/packaging
# UCX of which wheel: cu12, or cu13.
UCX    ?= cu12
# How many files of tests run at a time. A process of pytest that dies ends the run: pytest-xdist, which would replace it,
# may then wait for ever at the end.
WORKERS ?= 2
# CI has tests.twice here: a test that fails among others runs once more by itself.
PYTEST ?= pytest
XDIST  := --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0
ARGS   ?=
# Of fuzzing, for all targets together.
FUZZ_SECONDS ?= 300
# Of simulated jobs.
SIMULATE_SECONDS ?= 120
# What runs under the sanitizers; the tests of leaks measure memory, of which a sanitizer takes its own.
ASAN_TESTS ?= tests/conformance tests/fuzz/test_corpus.py tests/dataplane/test_layout.py tests/dataplane/test_atomic.py \
              tests/control/wire/test_poller.py tests/control/wire/test_reading_loop.py tests/control/wire/test_local_stream.py \
              tests/control/wire/test_short_frames.py tests/control/wire/test_plain.py \
              tests/control/model/test_future_state.py
TSAN_TESTS ?= tests/conformance tests/dataplane/test_memory_order.py tests/dataplane/test_epochs.py \
              tests/dataplane/test_atomic.py tests/dataplane/test_action.py tests/dataplane/test_operation.py \
              tests/dataplane/test_registration.py tests/dataplane/backends/verbs/test_lock.py \
              tests/torchstore/peers/test_shm_value_board.py tests/control/wire/test_poller.py \
              tests/control/wire/test_reading_loop.py tests/control/wire/test_local_stream.py \
              tests/control/wire/test_short_frames.py tests/control/wire/test_plain.py \
              tests/control/model/test_future_state.py
# Whose roots tests/roots makes.
PYTHONS ?= 3.13 3.14

.PHONY: help newer-python setup demo test test-opinfo test-packages test-verbs test-hosts test-gpu bench-gpu gpu-wheels fuzz simulate test-asan test-tsan test-pythons test-arm test-oldest test-engines check format bench bench-smoke bench-peers dist test-dist release docs docs-serve screenshots proto cli clean

help:
	@echo "make demo     run the main job: an RL loop whose trainer syncs weights to its generators"
	@echo "make test     run the tests           (TESTS=tests/control ARGS='-x' to choose)"
	@echo "make test-packages  install what some tests run for real from Debian (root): Slurm, Chromium, ..."
	@echo "make test-verbs  the tests that need an RDMA device, on Soft-RoCE in guest kernels (VERBS_TESTS, ARGS to choose)"
	@echo "make test-hosts  the tests of jobs on several machines: network namespaces, Slurm, Ray, torchrun (root; ARGS to choose)"
	@echo "make test-gpu  the tests on a GPU, without a network     (make gpu-wheels: what it installs, where there is one)"
	@echo "make bench-gpu  GPU memory compared with its ceilings, on the same machine"
	@echo "make fuzz     everything that takes bytes of others, for FUZZ_SECONDS (ARGS='frames handle' to choose)"
	@echo "make simulate  jobs on a virtual clock and network, for SIMULATE_SECONDS (ARGS='--first 1000000' for other seeds)"
	@echo "make test-asan  the compiled modules under AddressSanitizer and UBSan (ASAN_TESTS, ARGS to choose)"
	@echo "make test-tsan  the same under ThreadSanitizer, which looks for races (TSAN_TESTS, ARGS to choose)"
	@echo "make test-pythons  the core of the tests with other Pythons, in chroots (root; PYTHONS, ARGS to choose)"
	@echo "make test-arm  those of the compiled modules on aarch64, emulated (root; ARGS to choose)"
	@echo "make test-oldest  the core of the tests with the oldest packages that pyproject.toml claims"
	@echo "make test-engines  a real vLLM, which is installed into .cache/engines the first time    (ARGS='soak --syncs 20')"
	@echo "make test-opinfo  every operation of torch's own database on a mesh    (ARGS='--ops prod sort' to choose)"
	@echo "make check    linters, types, planted mistakes of types, imports and layers, generated protobuf code"
	@echo "make bench    the bandwidth sweep     (make bench-smoke: a short run for correctness)"
	@echo "make bench-peers  Skipper, Monarch, Ray, NIXL, ... in turns for 25 minutes, into benchmarks/results"
	@echo "make dist     the wheel and the source distribution, in dist"
	@echo "make test-dist  both looked through, and the wheel at work in an empty environment"
	@echo "make release  both, a wheel for each Python, built twice and compared (RELEASE_PYTHONS='python3.12 ...', SIGN=KEY)"
	@echo "make docs     the documentation as a site, in build/site    (make docs-serve: while it is written)"
	@echo "make screenshots  regenerate the pictures of the tutorial, by the test that lives through it"
	@echo "make proto    regenerate the protobuf code and the tables of messages"
	@echo "make cli      regenerate the page of all commands, and what shells complete"
	@echo "make setup    only the virtual environment; make clean removes what was built"

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Skipper needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@command -v "$${CC:-gcc}" >/dev/null || \
	  { echo "Skipper's dataplane is compiled, and there is no C compiler: apt-get install gcc libc6-dev python3-dev" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "Skipper's dataplane is compiled, and Python's headers are missing: apt-get install python3-dev" >&2; exit 1; }
	@echo "[1/2] making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "The venv module is missing: apt-get install python3-venv" >&2; exit 1; }

# The demo alone needs no browser, no Ray and no type checker: it begins a minute earlier.
$(DEMO_STAMP): $(SOURCES) | $(BIN)/python
	@$(INSTALLING)
	@$(PIP_INSTALL) -e '.[examples,$(UCX)]'
	@touch $@
	@$(INSTALLED)

$(STAMP): $(SOURCES) | $(BIN)/python
	@$(INSTALLING)
	@$(PIP_INSTALL) -e '.[dev,$(UCX)]'
	@touch $@ $(DEMO_STAMP)
	@$(INSTALLED)

demo: $(DEMO_STAMP)
	$(BIN)/python -m examples.rl_weight_sync $(ARGS)

test: $(STAMP)
	$(BIN)/python -m $(PYTEST) $(XDIST) $(TESTS) $(ARGS)

# Five minutes; the suite tries a part of it.
test-opinfo: $(STAMP)
	$(BIN)/python -m tests.tensor_engine.opinfo $(ARGS)

# Tests whose program is missing skip; so a machine that does not let us install goes on without.
test-packages:
	@apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	  $$(grep -v '^#' tests/debian-packages.txt) >/dev/null || \
	  echo "make test-packages: not all of tests/debian-packages.txt could be installed; their tests will skip" >&2

# The guest is a throw-away kernel with Soft-RoCE; it is built (minutes) where no cache has it. See tests/rdma_guest.
test-verbs: $(STAMP)
	$(BIN)/python -m tests.rdma_guest.parts $(VERBS_TESTS) -- $(ARGS)

# Machines are network and pid namespaces on a bridge of this one (tests/hosts/netns.py); Slurm, Ray and torchrun are
# started by the tests.
test-hosts: $(STAMP)
	SKIPPER_TEST_HOSTS=1 $(BIN)/python -m $(PYTEST) $(XDIST) tests/hosts tests/jobs $(ARGS)

# Guided by coverage where atheris has a wheel for this Python, else random. See CONTRIBUTING.md.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(ARGS) --seconds $(FUZZ_SECONDS)

# Each schedule of faults that breaks an invariant can be played again from its seed. See CONTRIBUTING.md.
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --seconds $(SIMULATE_SECONDS) $(ARGS)

# For a machine that has a GPU and no network: make gpu-wheels where there is one, carry the checkout and the folder of
# wheels there, and PYTHON=python3.12 make test-gpu. GPU_HAS names what such a machine has already: with it the wheels
# stay below GPU_WHEELS_MIB, which is what may be carried.
GPU_WHEELS     ?= .cache/gpu-wheels
GPU_PYTHON     ?= 3.12
GPU_CUDA       ?= 13
GPU_HAS        ?= cython psutil pygments safetensors uvloop
GPU_WHEELS_MIB ?= 56
GPU_OUT        ?= build/gpu/results

gpu-wheels test-gpu bench-gpu: newer-python
newer-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Skipper needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }

gpu-wheels:
	$(PYTHON) -m tests.gpu wheels --wheels $(GPU_WHEELS) --python $(GPU_PYTHON) --cuda $(GPU_CUDA) --has '$(GPU_HAS)' \
	  --limit-mib $(GPU_WHEELS_MIB)

test-gpu:
	$(PYTHON) -m tests.gpu test --wheels $(GPU_WHEELS) --cuda $(GPU_CUDA) --out $(GPU_OUT) $(ARGS)

bench-gpu:
	$(PYTHON) -m tests.gpu bench --wheels $(GPU_WHEELS) --cuda $(GPU_CUDA) --out $(GPU_OUT) $(ARGS)

# The tree is copied to build/asan and compiled there: the usual modules stay as they are.
test-asan: $(STAMP)
	$(BIN)/python -m tests.sanitizers address $(ASAN_TESTS) $(ARGS)

# The same in build/tsan.
test-tsan: $(STAMP)
	$(BIN)/python -m tests.sanitizers thread $(TSAN_TESTS) $(ARGS)

# Chroots of Debian's, made the first time: see tests/roots.
test-pythons:
	$(PYTHON) -m tests.roots $(PYTHONS) -- $(XDIST) $(ARGS)

test-arm: $(STAMP)
	$(BIN)/python -m tests.roots arm64 -- $(XDIST) $(ARGS)

# Of the packages that pyproject.toml requires; the newest are in the root for the newest Python.
test-oldest: $(STAMP)
	$(BIN)/python -m tests.oldest $(XDIST) $(ARGS)

# A real vLLM in an environment of its own, made the first time: see docs/engines.md.
test-engines: $(STAMP)
	$(BIN)/python -m tests.engines $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.typing
	$(BIN)/lint-imports
	$(BIN)/python -m tests.structure
	$(BIN)/python -m skipper.control.wire.regenerate --check
	$(BIN)/python -m skipper.control.wire.protocol_page --check
	$(BIN)/python -m skipper.cli.generate --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)
	$(BIN)/python -m skipper.control.wire.regenerate
	$(BIN)/python -m skipper.control.wire.protocol_page

cli: $(STAMP)
	$(BIN)/python -m skipper.cli.generate

bench: $(STAMP)
	$(BIN)/python -m skipper.benchmarks.bandwidth --local --all --check $(ARGS)

bench-smoke: $(STAMP)
	$(BIN)/python -m skipper.benchmarks.bandwidth --local -s 4K -s 1M -s 16M --op read -n 20 --check
	$(BIN)/python -m skipper.benchmarks.bandwidth --local -s 4K -s 1M -s 16M --op write -n 20 --check --backend ucx

# Peers are installed into .cache/peers the first time. See docs/performance.md.
bench-peers: $(STAMP)
	$(BIN)/python -m skipper.benchmarks.peers $(ARGS)

# The wheel is built from the source distribution, so that one is tried as well.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m tests.packaging.build --out dist

test-dist: dist
	SKIPPER_TEST_DIST=dist $(BIN)/python -m pytest tests/packaging $(ARGS)

# For this Python and every other from 3.11 on that is found, or for those that are named. See SECURITY.md on SIGN.
release: $(STAMP)
	rm -rf dist
	$(BIN)/python -m tests.packaging.release --out dist $(foreach python,$(RELEASE_PYTHONS),--python $(python)) \
	  $(if $(SIGN),--sign $(SIGN))

# Any warning is an error: a dead link or anchor, a page that is in no menu, a docstring that does not fit its function.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

screenshots: $(STAMP)
	$(BIN)/$(PYTEST) tests/integration/test_example_find_a_hang.py --screenshots $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find control dataplane \( -name '*.so' -o -name '_future.c' -o -name '_frames.c' -o -name '_plain.c' -o -name '_poller.c' -o -name '_ucp.c' -o -name '_copy.c' -o -name 'lock.c' \) -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
