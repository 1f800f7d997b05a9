# Stamps say that the environment is ready, for the command and for tests; both are made again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow fuzz lint docs bench leaderboard clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch comes first and in exactly this spelling: a looser one may resolve to a build with gigabytes of CUDA.
$(BASE): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e .
	touch $@

$(STAMP): $(BASE)
	$(BIN)/pip install -e ".[test,lint,openvino]"
	touch $@

setup: $(STAMP)  ## Make .venv with everything in it

demo: $(BASE)  ## Quantize, export and check a model, from nothing, with a report in demo-output/
	$(BIN)/bitwright quickstart --output demo-output

# Two processes with one thread each: threads that spin against each other make tests many times slower.
test: $(STAMP)  ## Run the tests; those on real data skip themselves where there is none
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: $(STAMP)  ## Run the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow --timeout 1800

fuzz: $(STAMP)  ## Read 10,000 mutated files of all formats; the result is benchmarks/results/fuzz.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py --cases 10000 --record

lint: $(STAMP)  ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)  ## Build the documentation into site/, with warnings as errors
	test -x $(BIN)/mkdocs || $(BIN)/pip install -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Run the benchmarks, one by one
	@set -e; for file in $(filter-out %/common.py %peers.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file"; done

# It goes on where it was left; `make leaderboard` in a second terminal, or on another machine, helps. After a change of the
# code, begin anew: rm -rf benchmarks/*.db benchmarks/*.starts
# Wider vectors add numbers in another order: with AVX2, which nearly all have, other CPUs give the same numbers.
leaderboard: export ATEN_CPU_CAPABILITY := avx2
leaderboard: export ONEDNN_MAX_CPU_ISA := AVX2
leaderboard: export OMP_NUM_THREADS := 1
leaderboard: $(STAMP)  ## Run the reference leaderboard (1,440 trainings, about an hour of one core; BITWRIGHT_DATA)
	$(BIN)/bitwright grid run benchmarks/leaderboard.yaml -o benchmarks/results/leaderboard.json
	$(BIN)/bitwright grid run benchmarks/leaderboard_why.yaml --starts benchmarks/leaderboard.starts -o benchmarks/results/leaderboard_why.json
	$(BIN)/bitwright grid run benchmarks/leaderboard_ranges.yaml --starts benchmarks/leaderboard.starts -o benchmarks/results/leaderboard_ranges.json
	$(BIN)/python benchmarks/leaderboard_folding.py
	$(BIN)/python benchmarks/leaderboard_zero_points.py
	$(BIN)/python benchmarks/leaderboard_gaps.py
	$(BIN)/python benchmarks/leaderboard_findings.py

clean:  ## Remove what was made
	rm -rf .venv build dist site demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
