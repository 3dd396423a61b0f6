# The single entry point for all tasks. Every target sets up its requirements and skips steps
# already up to date.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# SGLang and vLLM require different releases of torch and other packages.
SGLANG_VENV := .venv-sglang
SGLANG_STAMPS := $(SGLANG_VENV)/.stamps
JOBS ?= $(shell nproc)
# Python interpreter for the environment, 3.11 or later.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))) \
	python3)
export PYTHON
# Uses the environment's cmake and ninja, even if the system has none.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_RETRIES := 10
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
# Objects are shared by checkouts in other folders, and objects with a precompiled header are kept.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
endif
ARGS ?=
COMMA := ,

CORE := $(shell find csrc -name '*.cc' -o -name '*.hpp' -o -name '*.cu')
FORMATTED := $(shell find csrc tests bench -name '*.cc' -o -name '*.hpp')

PHONY_NATIVE := $(foreach variant,plain asan tsan,native-$(variant) native-$(variant)-long)
.PHONY: $(PHONY_NATIVE) native-quick ahead-asan ahead-tsan lint-quick quick help setup setup-sglang demo demo-sglang test gate cases test-native test-long test-guest netplugin test-netplugin bench-netplugin coverage mutations compare gpu-check gpu-check-vllm gpu-kit model fuzz bench bench-relay bench-sglang lint lint-all lint-python lint-format lint-cpp lint-changed docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo "  ARGS='…' is passed on, e.g. make demo ARGS=--baseline; make fuzz SECONDS=600 fuzzes 600 s each"

setup: $(STAMPS)/installed ## install vLLM, the tools and the core into .venv

setup-sglang: $(SGLANG_STAMPS)/r2serve ## install SGLang for CPUs, with the core, into .venv-sglang

demo: setup $(STAMPS)/system-demo ## serve a model over two nodes while rails fail
	$(BIN)/r2serve demo $(ARGS)

demo-sglang: setup-sglang $(STAMPS)/system-demo ## as demo, with SGLang
	$(SGLANG_VENV)/bin/r2serve demo --engine sglang $(ARGS)

# Cost of rail losses for requests: minutes. With FULL=1 the whole benchmark runs for hours; an
# interrupted run resumes at the same commit.
BENCH = $(BIN)/r2serve bench
BENCH_SERVE = $(BENCH) serve --json bench/results/serve.jsonl --rate 3
BENCH_COLLECTIVES = $(BENCH) collectives --resume
bench: setup $(STAMPS)/system-bench $(if $(FULL),$(STAMPS)/system-rivals) ## measure the cost of rail losses for requests, r2ccl and gloo; FULL=1: all
ifdef FULL
	$(BENCH_SERVE) --out build/bench-pairs --label permanent --requests 300 --pairs 5 \
		--scenario healthy --scenario permanent
	$(BENCH_SERVE) --out build/bench-rails --label rails --requests 60 \
		--contender r2ccl-rails --scenario all-rails-8s
	$(BENCH_SERVE) --out build/bench-rail0 --label rail0 --requests 60 \
		--contender r2ccl --contender mptcp --scenario mgmt-is-rail0
endif
	$(BENCH_SERVE) --out build/bench-serve --docs docs/benchmarks.md --requests 60 \
		$(if $(FULL),$(ALL_CONTENDERS) $(ALL_SCENARIOS),$(FEW)) $(ARGS)
ifdef FULL
	$(BENCH_COLLECTIVES) --ranks 2 --ranks 4 --resilience-compare --stalls 20 \
		--json bench/results/collectives.json --png docs/collectives.png --docs docs/benchmarks.md
	$(BENCH_COLLECTIVES) --full --resume --json bench/results/matrix.json
	$(BENCH) stalls --resume --json bench/results/stalls.json
	$(BENCH) baseline --check
endif

# Numbers of the relay: in a lab, then with vLLM. WITH= names the contenders.
WITH ?= r2ccl mptcp
MGMT_SCENARIOS := $(addprefix --scenario ,healthy $(addprefix mgmt-,carrier-loss gone black-hole flap reset then-rail))
RAIL0_SCENARIOS := $(addprefix --scenario ,healthy-on-rail0 mgmt-is-rail0)
RELAY_RUNS = $(BENCH_SERVE) --requests 60 --pairs 5 $(addprefix --contender ,$(WITH))
bench-relay: setup $(STAMPS)/system-bench ## measure relays: in a lab, with vLLM while the management NIC fails, and their cost
	$(BENCH) control --json bench/results/control.jsonl
	$(RELAY_RUNS) --label relay --out build/bench-relay $(MGMT_SCENARIOS)
	$(RELAY_RUNS) --label relay-rail0 --out build/bench-relay-rail0 $(RAIL0_SCENARIOS)
	$(BENCH) serve --json bench/results/alternate.jsonl \
		--alternate R2CCL_CONTROL=rails --usual R2CCL_CONTROL=direct

# The commands of SGLang come first in PATH; the benchmark itself is in vLLM's environment.
SGLANG_SCENARIOS := $(addprefix --scenario ,healthy carrier-loss black-hole mgmt-carrier-loss mgmt-gone permanent)
SGLANG_SERVE = PATH=$(CURDIR)/$(SGLANG_VENV)/bin:$$PATH $(BENCH) serve --engine sglang \
	--json bench/results/serve.jsonl
bench-sglang: setup setup-sglang $(STAMPS)/system-bench ## measure SGLang with r2ccl and gloo while NICs fail
	$(SGLANG_SERVE) --rate 1 --requests 30 --pairs 5 --out build/bench-sglang \
		--contender r2ccl --contender gloo $(SGLANG_SCENARIOS)
	$(SGLANG_SERVE) --label sglang-faults --out build/bench-sglang-faults --requests 40 --concurrency 8 \
		--output-tokens 1000 --sigma 0 --scenario twenty-faults

FEW := $(addprefix --contender ,r2ccl gloo) $(addprefix --scenario ,healthy carrier-loss black-hole)
ALL_CONTENDERS := $(addprefix --contender ,r2ccl gloo ecmp mptcp restart)
ALL_SCENARIOS := $(addprefix --scenario ,healthy carrier-loss black-hole peer-port-loss flap-8s slow two-faults \
	all-rails-8s mgmt-carrier-loss mgmt-gone mgmt-black-hole mgmt-flap mgmt-reset mgmt-then-rail permanent)

# Records the duration of a step.
TIMED := $(PYTHON) tests/timings.py run

# docs/testing.md describes the stages. ARGS go to pytest.
GATE := $(BIN)/python tests/gate.py
STAGES ?=
# A first setup leaves CPUs idle, so the ASan variant is compiled beside it, in a session of its own
# with the lowest weight. The first stages compile the rest (tests/beside.py).
SET_UP := $(if $(wildcard $(STAMPS)/installed),setup,$(STAMPS)/tools)
define set_up
$(if $(wildcard $(STAMPS)/installed),,@mkdir -p build; \
	setsid sh -c 'echo 19 >/proc/self/autogroup; exec nice -n 19 $(MAKE) ahead-asan' \
		>build/ahead.log 2>&1 & ahead=$$!; \
	trap 'kill -TERM -$$ahead 2>/dev/null' EXIT; \
	$(MAKE) setup)
endef
test: $(STAMPS)/system-test $(SET_UP) ## run all tests, cheapest first; STAGES="plain unit" runs these only
	$(set_up)
	@$(GATE) $(STAGES) -- $(ARGS)

quick: setup $(STAMPS)/system-test $(STAMPS)/system-lint ## lint changed files, run exact native and unit tests: what to run between two edits
	@$(GATE) --quick $(STAGES) -- $(ARGS)

gate: $(STAMPS)/system-test $(STAMPS)/system-lint $(SET_UP) ## lint and run all tests, also after a failure, and list all failures
	$(set_up)
	@$(GATE) --keep-going --deadline $(DEADLINE) $(or $(STAGES),$(ALL_STAGES)) -- $(ARGS)
ALL_STAGES := lint plain unit engines guest asan tsan alone
# Seconds for all stages, on a quiet machine; the gate multiplies the limit by its factor for waits.
DEADLINE ?= 4500

cases: setup $(STAMPS)/system-test ## run the tests of reports from the field, long ones too, and print before and now; MACHINES=1 prints start line and doctor of their machines, SCRIPTS=FOLDER also runs scripts that judge themselves
	@$(BIN)/python -m pytest -q -n 1 -m case --cases $(if $(MACHINES),--machines) --durations=0 --durations-min=20 $(ARGS) \
		; tests=$$?; $(if $(SCRIPTS),$(BIN)/python tests/case_scripts.py $(SCRIPTS) &&) exit $$tests

# GCC builds the plain variant and clang the others, so both compilers check every file. Reports
# need only line tables as debugging information, which saves a third of the compile time. The plain
# variant is the installed build plus the tests.
PLAIN_FLAGS := -O2 -g1 -DNDEBUG
SANITIZED := -DCMAKE_CXX_COMPILER=clang++ '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -gline-tables-only' \
	-DR2CCL_PYTHON=OFF
ASAN := $(SANITIZED) -DR2CCL_SANITIZE=address$(COMMA)undefined
TSAN := $(SANITIZED) -DR2CCL_SANITIZE=thread
FUZZED := -DCMAKE_CXX_COMPILER=clang++ '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g' \
	-DR2CCL_PYTHON=OFF -DR2CCL_FUZZ=ON
# Arguments: variant, options of CMake.
define configure
@cmake -S . -B build/native-$(1) -G Ninja -DR2CCL_TESTS=ON \
	-DR2CCL_TEST_RESULTS=$(CURDIR)/build/results/$(1) $(2) >build/$(1).log \
	|| { cat build/$(1).log; exit 1; }
endef
# Arguments: variant, options of CMake, step of the sweep, options of CTest.
define native
@echo "== native tests: $(1)"
@rm -rf build/results/$(1)
$(call configure,$(1),$(2))
@$(TIMED) "build of the native tests, $(1)" cmake --build build/native-$(1)
@$(TIMED) "native tests, $(1)" env R2SERVE_SWEEP=$(3) ctest --test-dir build/native-$(1) --output-on-failure \
	--no-tests=error -j$(JOBS) $(4)
endef

native-plain: setup $(STAMPS)/system-test
	$(call native,plain,-DR2CCL_LONG_TESTS=OFF,16)
ASAN_TESTS := $(ASAN) -DR2CCL_LONG_TESTS=OFF
TSAN_TESTS := $(TSAN) -DR2CCL_LONG_TESTS=OFF -DR2CCL_TSAN_ALL=OFF
native-asan: setup $(STAMPS)/system-test
	$(call native,asan,$(ASAN_TESTS))
native-tsan: setup $(STAMPS)/system-test
	$(call native,tsan,$(TSAN_TESTS))
# Compiled beside other stages, see tests/beside.py.
ahead-asan: $(STAMPS)/tools $(STAMPS)/system-test
	$(call configure,asan,$(ASAN_TESTS))
	@cmake --build build/native-asan
ahead-tsan: $(STAMPS)/tools $(STAMPS)/system-test
	$(call configure,tsan,$(TSAN_TESTS))
	@cmake --build build/native-tsan
native-quick: setup $(STAMPS)/system-test
	$(call native,plain,-DR2CCL_LONG_TESTS=OFF,64,-LE slow)
test-native: native-plain native-asan native-tsan ## run the native tests only

native-plain-long: setup $(STAMPS)/system-test
	$(call native,plain,-DR2CCL_LONG_TESTS=ON,1)
native-asan-long: setup $(STAMPS)/system-test
	$(call native,asan,$(ASAN) -DR2CCL_LONG_TESTS=ON,16)
native-tsan-long: setup $(STAMPS)/system-test
	$(call native,tsan,$(TSAN) -DR2CCL_LONG_TESTS=ON -DR2CCL_TSAN_ALL=ON,16)
PART ?=
WITH_SGLANG := $(if $(PART),$(filter sglang,$(PART)),sglang)
test-long: setup $(if $(WITH_SGLANG),setup-sglang) $(STAMPS)/system-test $(STAMPS)/system-lint ## run the long tests (hours); PART=… runs one of lint plain asan tsan unit searches engines sglang servers hour stalls loads guest faults
	@$(GATE) --keep-going --deadline 43200 --long $(PART) -- $(ARGS)

# The plugin alone, without Python: needs cmake and a C++ compiler only.
NETPLUGIN := build/netplugin
netplugin: ## build the network plugin for NCCL, build/netplugin/libnccl-net-r2ccl.so
	@mkdir -p build
	@cmake -S . -B $(NETPLUGIN) -DR2CCL_PYTHON=OFF -DR2CCL_TESTS=OFF >build/netplugin.log \
		|| { cat build/netplugin.log; exit 1; }
	@cmake --build $(NETPLUGIN) --target nccl-net-r2ccl
	@echo "$(CURDIR)/$(NETPLUGIN)/libnccl-net-r2ccl.so"

NET_TESTS := net_abi_test net_parts_test net_start_test net_player_test
test-netplugin: setup $(STAMPS)/system-test ## test the network plugin, 1,000,000 messages a version and 500 faults of each kind included
	@cmake -S . -B build/native-plain -G Ninja -DR2CCL_TESTS=ON -DR2CCL_LONG_TESTS=ON >build/plain.log \
		|| { cat build/plain.log; exit 1; }
	@cmake --build build/native-plain --target $(NET_TESTS)
	@for name in $(NET_TESTS); do build/native-plain/$$name $(ARGS) || exit 1; done

bench-netplugin: setup $(STAMPS)/system-test ## measure the network plugin beside the raw socket floor, against its targets; ARGS="--rounds 5000 --faults 500"
	@cmake -S . -B build/native-plain -G Ninja -DR2CCL_TESTS=ON >build/plain.log || { cat build/plain.log; exit 1; }
	@cmake --build build/native-plain --target net_bench
	@$(BENCH) netplugin $(ARGS)

# Each native program runs separately, so that its covered lines are known.
coverage: setup $(STAMPS)/system-test ## measure line and branch coverage of the quick tests; ARGS choose Python tests
	@cmake -S . -B build/coverage -G Ninja -DR2CCL_TESTS=ON -DR2CCL_PYTHON=OFF \
		'-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 --coverage -fprofile-update=atomic' >build/coverage.log \
		|| { cat build/coverage.log; exit 1; }
	@CCACHE_DISABLE=1 cmake --build build/coverage
	@$(BIN)/python tests/power/cover.py native
	@$(BIN)/python tests/power/cover.py python $(ARGS)
	@$(BIN)/python tests/power/cover.py show

mutations: setup $(STAMPS)/system-test ## plant small bugs in the core and the package, and report those caught by tests
	@$(BIN)/python tests/power/try_mutations.py cpp
	@$(BIN)/python tests/power/try_mutations.py python

# Needs a quiet machine, and up to 20 minutes besides both builds.
BASE ?= HEAD
compare: setup ## compare the latency of healthy collectives with commit BASE, start by start
	@$(BIN)/python tests/compare/compare.py $(BASE) $(ARGS)

# The kernel comes from the distribution, fetched once. UML=1 builds a kernel to run as a process,
# once.
UML_KERNEL := build/guest/linux
test-guest: setup $(STAMPS)/system-test $(STAMPS)/system-guest $(if $(UML),$(UML_KERNEL)) ## test RDMA rails on Soft-RoCE in QEMU; UML=1: in User-Mode Linux
	@cmake -S . -B build/native-plain -DR2CCL_TESTS=ON >build/plain.log || { cat build/plain.log; exit 1; }
	@cmake --build build/native-plain --target guest_tests
	@$(BIN)/python tests/guest/check.py $(if $(UML),--uml $(UML_KERNEL)) --timeout 900 -- $(ARGS)

gpu-check: ## run the GPU checks, shortest first; needs a Python with torch for CUDA; exit status 77: no GPU
	@tests/gpu/first.sh $(ARGS)

gpu-check-vllm: ## run vLLM as two nodes on a shared GPU while rails fail; lists missing requirements first
	@tests/gpu/first.sh facts install vllm $(ARGS)

gpu-kit: ## build a wheel for a GPU machine in build/gpu-kit; needs Python 3.12 and nvcc
	@$(PYTHON) tests/gpu/kit.py

$(UML_KERNEL):
	tests/guest/build_uml.sh $@

model: $(STAMPS)/system-model ## search the protocol's model exhaustively with Spin
	@$(PYTHON) docs/model/check.py $(ARGS)

# New corpus inputs go to build/fuzz/found; an input with a crash is stored beside this folder.
SECONDS := 60
fuzz: setup $(STAMPS)/system-test ## fuzz the wire parser, the handshake and the streams, SECONDS=60 each
	@mkdir -p build/fuzz/found/frames build/fuzz/found/handshake build/fuzz/found/streams
	@cmake -S . -B build/fuzz -G Ninja $(FUZZED) >build/fuzz.log || { cat build/fuzz.log; exit 1; }
	@cmake --build build/fuzz --target frames_fuzz handshake_fuzz streams_fuzz
	@for name in frames handshake streams; do \
		echo "== $$name: $(SECONDS) s"; \
		build/fuzz/$${name}_fuzz -max_total_time=$(SECONDS) -max_len=2000 -print_final_stats=1 \
			-artifact_prefix=build/fuzz/$$name- $(ARGS) \
			build/fuzz/found/$$name tests/native/fuzz/corpus/$$name || exit 1; \
	done

# Linting needs only the tools, not a core up to date.
TOOLS_READY := $(if $(wildcard $(STAMPS)/installed),,setup)
# mypy uses a single CPU, so clang-tidy runs beside it. Argument: variables of lint-changed.
define lint
@mkdir -p build
@$(MAKE) lint-changed $(1) >build/lint-changed.log 2>&1 & changed=$$!; \
	$(MAKE) lint-python lint-format; status=$$?; \
	wait $$changed || status=$$?; cat build/lint-changed.log; exit $$status
endef
lint: $(TOOLS_READY) $(STAMPS)/system-lint ## check formatting and types, clang-tidy on changed files (LINT_BASE=commit)
	$(call lint)
# Uncommitted changes only. A file beyond the limit is left to `make lint`.
lint-quick: $(TOOLS_READY) $(STAMPS)/system-lint
	$(call lint,LINT_BASE=HEAD LINT_LIMIT=30)
lint-all: lint-python lint-cpp ## check formatting and types, clang-tidy on all files

# mypy checks the package in the layout of a wheel, with bench and kernels below r2serve.
TYPES := build/types/r2serve
lint-python: $(TOOLS_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -s $(CURDIR)/r2serve/* $(CURDIR)/bench $(CURDIR)/kernels $(TYPES)/
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# clang-tidy is slow, so each file has a stamp, redone when the file or any header changes.
TIDY := $(patsubst %.cc,build/tidy/%.ok,$(filter %.cc,$(CORE)))
lint-format: $(STAMPS)/system-lint
	clang-format --dry-run -Werror $(FORMATTED)
lint-cpp: $(TOOLS_READY) lint-format
	@$(MAKE) -j$(JOBS) $(TIDY)

# Files changed since LINT_BASE, the latest first, and files that include a changed header.
# LINT_LIMIT bounds the time in s.
LINT_BASE ?= $(shell tests/lint_base.sh)
LINT_LIMIT ?= 100
CHANGED = $(shell { git diff --name-only HEAD -- csrc; \
	git log --format= --name-only $(LINT_BASE)..HEAD -- csrc; } 2>/dev/null | awk '!seen[$$0]++')
CHANGED_HEADERS = $(patsubst csrc/%,-e '"%"',$(filter %.hpp,$(CHANGED)))
INCLUDING = $(if $(CHANGED_HEADERS),$(shell grep -rlF --include='*.cc' $(CHANGED_HEADERS) csrc))
# Changed files come first: the limit leaves out files that only include a changed header.
TIDIED = $(filter $(TIDY),$(patsubst %.cc,build/tidy/%.ok,$(filter %.cc,$(1))))
TO_TIDY = $(call TIDIED,$(CHANGED)) $(filter-out $(call TIDIED,$(CHANGED)),$(call TIDIED,$(sort $(INCLUDING))))
lint-changed: $(TOOLS_READY) $(STAMPS)/system-lint
	@echo "clang-tidy: $(words $(TO_TIDY)) files changed since $(LINT_BASE); make lint-all checks all"
	@$(if $(TO_TIDY),timeout $(LINT_LIMIT) $(MAKE) -k -j$(JOBS) $(TO_TIDY) || { status=$$?; [ $$status = 124 ] && \
		echo "clang-tidy: not all files within $(LINT_LIMIT) s" || exit $$status; })

build/tidy/%.ok: %.cc .clang-tidy $(filter %.hpp,$(CORE)) | build/tidy/compile_commands.json
	@mkdir -p $(@D)
	@echo "clang-tidy $<"
	@clang-tidy --quiet -p build/tidy $< >$(@:.ok=.log) 2>&1 || { cat $(@:.ok=.log); exit 1; }
	@touch $@

build/tidy/compile_commands.json: CMakeLists.txt $(filter %.cc,$(CORE))
	@cmake -S . -B build/tidy -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DR2CCL_UNITY=OFF \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >/dev/null
	@touch $@

docs: setup ## regenerate docs/configuration.md from r2serve/config.py
	$(BIN)/r2serve config --markdown >docs/configuration.md

clean: ## remove all build results and the environment
	rm -rf build $(VENV) $(SGLANG_VENV) .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- internal targets ---------------------------------------------------------------------------

$(STAMPS)/system-%: deploy/setup/system.sh
	@deploy/setup/system.sh $*
	@mkdir -p $(STAMPS) build && touch $@

$(STAMPS)/venv: | $(STAMPS)/system-build
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "r2serve needs Python 3.11 or later; set PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# pip uses a single CPU for vLLM, so the core is compiled meanwhile. A failed compilation is repeated,
# with its errors, by the installation of r2serve.
$(STAMPS)/engine: deploy/setup/engine.py | $(STAMPS)/tools
	@echo "== installing vLLM, once: about 4 GB on disk, some minutes; for an NVIDIA GPU, a download of 3 GB"
	@mkdir -p build
	@CXX=g++ $(TIMED) "core, beside vLLM" $(BIN)/python -m pip wheel $(PIP_CORE) --no-deps --no-index \
		--wheel-dir build/wheels . >build/core.log 2>&1 & \
	$(TIMED) "vLLM" $(BIN)/python deploy/setup/engine.py; status=$$?; wait; exit $$status
	@touch $@

$(SGLANG_STAMPS)/engine: deploy/setup/sglang.py | $(STAMPS)/venv
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "== installing SGLang (minutes, once)"
	@$(TIMED) "SGLang" $(SGLANG_VENV)/bin/python deploy/setup/sglang.py install
	@mkdir -p $(@D) && touch $@

# Both environments have the same Python, so the core is compiled for one of them only.
$(SGLANG_STAMPS)/r2serve: $(SGLANG_STAMPS)/engine $(STAMPS)/installed deploy/setup/sglang.py
	@$(SGLANG_VENV)/bin/python deploy/setup/sglang.py share \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

TOOLS := deploy/setup/tools.txt
PIP_CORE := --quiet --no-build-isolation -C build-dir=build/native-plain \
	-C cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO="$(PLAIN_FLAGS)"
PIP := $(BIN)/python deploy/setup/pip_quietly.py
$(STAMPS)/tools: pyproject.toml $(TOOLS) | $(STAMPS)/venv
	@$(PIP) install --quiet -c $(TOOLS) cmake ninja nanobind scikit-build-core
	@touch $@

# Installed under a separate prefix, because Open MPI's programs have the same names.
$(STAMPS)/mpich: | $(STAMPS)/venv
	@$(PIP) install --quiet --prefix $(VENV)/mpich mpich
	@touch $@

# The core is compiled here, never at import. Python sources are used in place.
.PHONY: build-is-gone
build-is-gone:
$(STAMPS)/installed: $(STAMPS)/engine $(STAMPS)/tools $(STAMPS)/mpich pyproject.toml CMakeLists.txt $(CORE) \
		$(if $(wildcard build/native-plain/build.ninja),,build-is-gone)
	@echo "== building and installing r2serve: about 4 minutes of CPU time at first"
	@CXX=g++ $(TIMED) "r2serve and its tools" $(PIP) install $(PIP_CORE) -c $(TOOLS) \
		-e '.[bench,sidecar,dev]'
	@touch $@
