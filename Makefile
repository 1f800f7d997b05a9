# BASE and STAMP mark a finished installation: BASE for the command, STAMP for tests and linters. Both are rebuilt when
# pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow fuzz lint docs bench leaderboard peers clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Install torch first, with an exact version. A looser requirement may resolve to a CUDA build of several gigabytes.
$(BASE): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e .
	touch $@

$(STAMP): $(BASE)
	$(BIN)/pip install -e ".[test,lint,openvino]"
	touch $@

setup: $(STAMP)  ## Create .venv with everything that tests and linters need

demo: $(BASE)  ## Train, quantize, export and check a small model; write a report to demo-output/
	$(BIN)/bitwright quickstart --output demo-output

# Two processes with one thread each. More threads than cores make tests many times slower.
test: $(STAMP)  ## Run the tests; tests on real data are skipped if BITWRIGHT_DATA is not set
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: $(STAMP)  ## Run the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow --timeout 1800

fuzz: $(STAMP)  ## Read 10,000 mutated files of all formats; write benchmarks/results/fuzz.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py --cases 10000 --record

lint: $(STAMP)  ## Check style, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cd benchmarks && ../$(BIN)/mypy --config-file mypy.ini *.py
	$(BIN)/lint-imports

docs: $(STAMP)  ## Build the documentation into site/, with warnings as errors
	test -x $(BIN)/mkdocs || $(BIN)/pip install -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Run all benchmarks, and redraw the chart of the README
	@set -e; for file in $(filter-out %/common.py %peers.py %_sources.py %/peer_files.py %/readme_chart.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file"; done
	$(BIN)/python benchmarks/readme_chart.py

# Rerun the target to resume. To share the work, run it in a second terminal or on another machine. After a change of
# the code, delete the old results first: rm -rf benchmarks/*.db benchmarks/*.starts
# The target uses AVX2 on every CPU, because wider vectors add numbers in another order and give other results.
leaderboard: export ATEN_CPU_CAPABILITY := avx2
leaderboard: export ONEDNN_MAX_CPU_ISA := AVX2
leaderboard: export OMP_NUM_THREADS := 1
leaderboard: $(STAMP)  ## Run the reference leaderboard: 1,440 trainings, about an hour on one core; needs BITWRIGHT_DATA
	$(BIN)/bitwright grid run benchmarks/leaderboard.yaml -o benchmarks/results/leaderboard.json
	$(BIN)/bitwright grid run benchmarks/leaderboard_why.yaml --starts benchmarks/leaderboard.starts -o benchmarks/results/leaderboard_why.json
	$(BIN)/bitwright grid run benchmarks/leaderboard_ranges.yaml --starts benchmarks/leaderboard.starts -o benchmarks/results/leaderboard_ranges.json
	$(BIN)/python benchmarks/leaderboard_folding.py
	$(BIN)/python benchmarks/leaderboard_zero_points.py
	$(BIN)/python benchmarks/leaderboard_gaps.py
	$(BIN)/python benchmarks/leaderboard_findings.py

peers: $(STAMP)  ## Read the published files of LPOT, MQBench and QSync, and traces; needs BITWRIGHT_DATA
	$(BIN)/python benchmarks/peer_files.py

clean:  ## Remove all generated files
	rm -rf .venv build dist site demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
