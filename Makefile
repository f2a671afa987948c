# The commands of the README, and the set-up that each does for itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run quick test test-sites test-cluster fuzz bench notebooks results docs screenshots hospitals format clean

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

run: setup
	$(BIN)/fedtailor compare local fedavg fedper ditto pgfed pfedmb fedacs pflego --data digits --clients 20 --partition dirichlet:0.3 --rounds 30 --seeds 0 --out comparisons/race
	$(BIN)/fedtailor report comparisons/race --out race.html

quick: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not slow and not sites"

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not sites"

test-sites: setup
	$(BIN)/pytest -m sites

test-cluster: setup
	$(BIN)/python -m tests.transport.namespace tests/transport/cluster/short.py tests/transport/cluster/long.py

fuzz: setup
	$(BIN)/python -m tests.fuzz --seed 0 --seconds 600

bench: setup
	$(BIN)/python -m benchmarks

notebooks: setup
	$(BIN)/python -m notebooks.make

docs: setup
	$(BIN)/python -m docs.building

screenshots: setup
	$(BIN)/python -m docs.make_screenshots

results: setup
	$(BIN)/python -m results

hospitals: setup
	$(BIN)/python examples/hospitals/run.py runs/hospitals

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv comparisons/race race.html site build *.egg-info .pytest_cache .mypy_cache .ruff_cache
