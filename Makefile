# Everything runs in .venv, made on first use. Targets are the commands of the README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: pythons cache-kinds vision-pairs spec-pairs spec-text wheel setup setup-dev serve chat test quick quick-tests test-gpu sanitize lint format bench soak docs page page-check pictures audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $(STAMP)

# What tests, checks and benchmarks need besides.
setup-dev: $(DEV_STAMP)

$(DEV_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(DEV_STAMP)

# More flags: make serve ARGS="--port 8001 --api-key secret"
serve: setup
	@$(BIN)/quire serve $(ARGS)

chat: setup
	@$(BIN)/quire chat $(ARGS)

# What CI runs: lint and the whole suite. With arguments only those tests: make test ARGS="tests/scheduler -k storm"
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu"

test: setup-dev $(if $(ARGS),,lint)
	$(PYTEST) $(or $(ARGS),-n 2 --dist loadfile)

# While working: lint, and in parallel the fast tests of parts that need no model. Under a minute on two cores.
QUICK := tests/messages tests/kvcache tests/sessions tests/scheduler tests/router tests/output tests/layers
SLOWER := runTest or storm or fair or pacing or parsers or damage or kill

quick: setup-dev
	@$(MAKE) --no-print-directory -j 2 lint quick-tests

quick-tests: setup-dev
	@$(PYTEST) -x $(QUICK) -k "not ($(SLOWER))"

# The planning half under every supported Python that is found, each with an environment of its own in .venvs: it needs no
# torch. One that is missing is named. make pythons PYTHONS=3.10
PYTHONS ?= 3.10 3.11 3.12 3.13
PLANNING := tests/messages tests/kvcache tests/sessions tests/router tests/scheduler
NEEDS_TORCH := --ignore tests/kvcache/test_disk_files.py --ignore tests/sessions/test_stored_before_renames.py

pythons:
	@for version in $(PYTHONS); do \
		found=; \
		for each in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python; do \
			if test -z "$$found" && $$each -c "" 2>/dev/null; then found=$$each; fi; \
		done; \
		if test -z "$$found"; then echo "Python $$version: not found"; continue; fi; \
		test -x .venvs/$$version/bin/python || $$found -m venv .venvs/$$version || exit 1; \
		.venvs/$$version/bin/pip install --quiet --disable-pip-version-check numpy msgspec blake3 jinja2 tokenizers pyyaml rich pytest \
			pytest-timeout hypothesis || exit 1; \
		echo "Python $$version:"; \
		.venvs/$$version/bin/python -m pytest --noconftest -p no:cacheprovider -m "not slow and not gpu" $(PLANNING) $(NEEDS_TORCH) \
			-k "not ($(SLOWER))" || exit 1; \
	done

# For a machine with a GPU and no network: nothing is installed, python3 has torch, triton and pytest.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
SANITIZED ?= batch or decode or prefill or sampling or elementwise or skinny or prefix or moe

test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu tests/kernels -m "not slow" --durations=15 $(ARGS)

# Without torch's memory pool every tensor is an allocation of its own, and a step past its end is seen.
sanitize:
	QUIRE_SANITIZED=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all \
		$(GPU_PYTHON) -m pytest tests/kernels -m "not slow" -k "triton and ($(SANITIZED))" --timeout=600 $(ARGS)

lint: setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup-dev
	@$(BIN)/python benchmarks/run.py

cache-kinds: setup-dev  # every kind of cache over sessions, tiers, ranks and processes: 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine/test_cache_kinds.py tests/engine/test_cache_kind_pairs.py -m slow -n 2

vision-pairs: setup-dev  # images with every family over ranks, drafts, tiers and sessions: 5 minutes
	@$(BIN)/python -m pytest -q tests/vision -m "slow or not slow" $(ARGS)

spec-pairs: setup-dev  # drafts with every kind of cache over tiers, sessions, ranks and formats: 30 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/speculative -m slow -n 2

spec-text: setup-dev  # tokens with drafts against those without, the default model, 200 prompts: 15 minutes
	$(BIN)/python benchmarks/exactness.py

soak: setup-dev
	$(BIN)/python -m pytest -m slow --timeout=3600

# A package with CPU kernels for every level of instructions, in dist/: its users need no compiler.
wheel: setup-dev
	QUIRE_PREBUILT_KERNELS=1 $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

docs: setup-dev
	@$(BIN)/python -m quire.cli.reference > docs/configuration.md
	@$(BIN)/python -m quire.server.observability.metrics_page > docs/metrics.md
	@$(BIN)/python -m quire.cli.vllm_page > docs/from-vllm.md

# The page at /: compiled from page/ into quire/server/page/assets, which is part of the package. Needs node 20 or newer.
PAGE_STAMP := page/node_modules/.package-lock.json

$(PAGE_STAMP): page/package-lock.json
	cd page && npm ci --no-audit --no-fund --quiet

page: $(PAGE_STAMP)
	cd page && npm run --silent build

page-check: $(PAGE_STAMP)  # types, lint and tests of the page's sources
	cd page && npm run --silent check

pictures: setup-dev  # screenshots in docs/pictures, made with Chromium
	OMP_NUM_THREADS=2 $(BIN)/python docs/pictures/make.py $(ARGS)

# Dependencies with versions and licences; fails if one does not fit.
audit: setup-dev
	@$(BIN)/python deploy/audit.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
