# make train   set up, then train the quickstart     ARGS="..." appends flags (the last one wins), NPROC=n processes
#              (2, or 1 where there is one GPU; each takes a GPU, and CUDA_VISIBLE_DEVICES= in front trains on the CPU),
#              ENGINE=vllm-server or vllm-colocated samples with vLLM, into runs/quickstart-ENGINE
# make test    set up, then run all tests
# make help    what else there is

PYTHON ?= python3
NPROC ?= $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')),1,2)
ARGS ?=
ENGINE ?= embedded
# two processes, each with whole files: fixtures that start servers are started once; tests/conftest.py says in what order
PYTEST ?= -n 2 --dist loadscope --no-loadscope-reorder
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
OLDEST_TRITON := $(VENV)/triton-3.6.0
VLLM := $(VENV)/.installed-vllm
LINTERS := $(VENV)/.installed-lint
BROWSER := $(VENV)/browser
TRL := $(VENV)/trl
QUICKSTART := @examples/quickstart/flags.txt
ifneq ($(ENGINE),embedded)
QUICKSTART += --rl-engine $(ENGINE) --run-dir runs/quickstart-$(ENGINE) --rl-vllm-memory-gib 0.25
endif
# its build for CPUs, which vLLM's asks for by this name: from where pip is told to look, or else from PyTorch's own index
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export OMP_NUM_THREADS ?= 1

.PHONY: help install train test test-fast benchmark-deps browser trl lint format clean

help:
	@grep -E '^(# ( |make)|[a-z-]+:.*##)' Makefile | sed -E 's/^# //; s/:.*## /: /'

install: $(STAMP)  ## set up .venv and build the extension; does nothing when both are up to date

$(STAMP): requirements/cpu.txt requirements/dev.txt pyproject.toml setup.py $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PYTHON must be 3.11 or later, got " + sys.version)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH) || { echo "$(TORCH) is not where pip looks: from $(TORCH_INDEX)"; \
		$(PIP) install --quiet --index-url $(TORCH_INDEX) $(TORCH); }
	# it ships a wheel for 3.11 and declares >= 3.12 (where the flag does nothing); without --no-deps the flag
	# would reach its dependencies too
	$(PIP) install --quiet --ignore-requires-python --no-deps megatron-core==0.19.2
	$(PIP) install --quiet -r requirements/dev.txt
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $(STAMP)

train: install $(if $(filter embedded,$(ENGINE)),,$(VLLM))  ## train the quickstart into runs/quickstart
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
		examples/pretrain_replay_grpo.py $(QUICKSTART) $(ARGS)

$(VLLM): $(STAMP) requirements/vllm.txt
	$(PIP) install --quiet -r requirements/vllm.txt
	# they come with it, were built for other versions of torch, and nothing here needs them
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test: install $(VLLM) $(OLDEST_TRITON)/.installed $(LINTERS) $(BROWSER)/.installed $(TRL)/.installed  ## all tests
	$(PY) -m pytest $(PYTEST)

$(OLDEST_TRITON)/.installed: $(STAMP)
	# the newest Triton is in .venv, and the oldest that the kernels support is tested beside it; where there is no wheel
	# the tests that need it say so and are skipped
	$(PIP) install --quiet --no-deps --upgrade --target $(OLDEST_TRITON) triton==3.6.0 \
		&& touch $@ || echo 'triton 3.6.0 does not install here: it is left out of the tests'

test-fast: install  ## tests that start no run of several processes, in under 3 minutes
	$(PY) -m pytest $(PYTEST) -m "not slow"

benchmark-deps: install  ## install other projects' replay buffers into .venv/benchmark, for tools/benchmark_buffer.py
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/benchmark -r requirements/benchmark.txt

lint: install $(LINTERS)  ## ruff; mypy --strict on the package; hadolint; shellcheck
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile
	find . \( -path './.*' -o -path ./runs -o -path ./build \) -prune -o -name '*.sh' -print0 \
		| xargs -0 $(VENV)/bin/shellcheck .ci/run

browser: $(BROWSER)/.installed  ## a headless Chromium in .venv/browser, for the tests of tools/report.py

$(BROWSER)/.installed: $(STAMP) requirements/browser.txt tools/reporting/install_browser.py
	$(PY) tools/reporting/install_browser.py $(BROWSER)
	touch $@

trl: $(TRL)/.installed  ## TRL, for examples/integrations and tools/compare_trl.py, in .venv/trl: it sees .venv's packages

$(TRL)/.installed: $(STAMP) requirements/trl.txt requirements/trl.pth
	$(PY) -m venv --clear $(TRL)
	$(TRL)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/trl.txt
	cp requirements/trl.pth "$$($(TRL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(LINTERS): $(STAMP) requirements/lint.txt
	$(PIP) install --quiet -r requirements/lint.txt
	touch $@

format: install  ## let ruff rewrite what lint would refuse
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove what was built, not .venv and not runs/
	rm -rf build dist *.egg-info megatron_replay/_C*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
