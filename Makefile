# The commands of the README, and the set-up that each does for itself.
PYTHON ?= python3
BIN := .venv/bin
SUPPORTED := 3.11 3.12 3.13
# Those of them that are here. pyenv's have to be chosen: PYENV_VERSION=3.12.1:3.13.0 make test-python
FOUND = $(strip $(foreach version,$(SUPPORTED),$(shell python$(version) -c 'print("$(version)")' 2>/dev/null)))

.PHONY: setup run test test-rest test-all test-python test-long test-sites test-cluster fuzz kills bench notebooks package docs screenshots results hospitals format clean

setup: .venv/ready

.venv/ready $(SUPPORTED:%=.venv-%/ready): requirements.lock pyproject.toml
	$(patsubst .venv-%,python%,$(@D:.venv=$(PYTHON))) -m venv $(@D)
	$(@D)/bin/pip install --quiet --no-compile --requirement requirements.lock
	$(@D)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

run: setup
	$(BIN)/fedtailor compare local fedavg fedper ditto pgfed pfedmb fedacs pflego --data digits --clients 20 --partition dirichlet:0.3 --test 0.6 --rounds 30 --seeds 0 --out comparisons/race
	$(BIN)/fedtailor report comparisons/race --out race.html

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not slow and not long and not sites"

test-rest: setup
	$(BIN)/pytest -n 2 -m "slow and not long and not sites"

test-all: test test-rest

test-python:
	@echo "Python $(or $(FOUND),from 3.11 to 3.13 is not here)"
	@$(MAKE) $(or $(FOUND:%=test-python-%),nothing-to-test)

test-python-%: .venv-%/ready
	.venv-$*/bin/pytest -n 2 -m "not slow and not long and not sites"

test-long: setup
	$(BIN)/pytest -n 2 -m long

test-sites: setup
	$(BIN)/pytest -m sites

test-cluster: setup
	$(BIN)/python -m tests.engines.namespace tests/engines/cluster/short.py tests/engines/cluster/long.py

fuzz: setup
	$(BIN)/python -m tests.fuzz --seed 0 --seconds 600

kills: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kills --seed 0 --count 1000

bench: setup
	$(BIN)/python -m benchmarks

notebooks: setup
	$(BIN)/python -m notebooks.make

package: setup
	$(BIN)/python -m tests.wheel

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
	rm -rf .venv .venv-* comparisons/race race.html site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
