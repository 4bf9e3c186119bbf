# Two commands do everything on a machine with Python 3.10 or newer, git and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# By all cores, where pip takes one; and once, where PYTHONDONTWRITEBYTECODE has each process compile for itself.
COMPILE = $(BIN)/python -m compileall -q -j 0

.PHONY: help demo demo-digits test test-all lint unit durations thorough stores docs soak pictures fuzz chaos faults rehearsal isolation bench release lock matrix matrix-short clean
help:
	@echo "make demo    a version and a delta at once; then two servers are kept fresh while a cluster trains"
	@echo "make demo-digits  train a classifier on a loopback cluster, export, serve, predict, compare"
	@echo "make test    lint, types, and the tests that show within ten minutes whether a change is right"
	@echo "make test-all  all other tests: real processes in every combination, kills, campaigns; half an hour"
	@echo "make durations  how long each test file takes, measured anew: on an idle machine, so that long ones begin first"
	@echo "make thorough  all tests, ten times as much of what they leave to chance, and updates over mapped tables"
	@echo "make stores  the tests of object stores, Azure's too; installs Azurite by npm"
	@echo "make docs    the documentation as a site, in build/site; fails on a broken link"
	@echo "make pictures  pictures of the status page for the guide, and of each incident in build/pictures, by Chromium"
	@echo "make engines  jobs on two nodes of Ray, and over all engines in any order; some minutes"
	@echo "make soak    hundreds of increments of a cluster whose processes die at random; some minutes"
	@echo "make fuzz    thousands of damaged files, documents, answers and requests of every kind; some minutes"
	@echo "make chaos   all that trainers, exporters, operators and accidents do, in random order; half an hour"
	@echo "make rehearsal  twelve incidents of a model in a bucket, what everybody says of them, and the commands that end them"
	@echo "make isolation  a million responses beside updates of mapped tables, none of which mixes positions"
	@echo "make faults  processes killed and paused, networks cut, disks full, clocks set, beside an agent: MINUTES=10"
	@echo "make release two wheels, an sdist, checksums and a bill of materials in dist/, tried in an empty environment"
	@echo "make lock    the versions that deploy/Dockerfile installs, anew"
	@echo "make matrix  every supported TensorFlow makes a base, and every one serves it; a quarter of an hour, 10 GB"
	@echo "make matrix-short  the oldest TensorFlow with the oldest libraries, and the newest Python; some minutes, 4 GB"
	@echo "make bench   the speed suite, as ratios against stock TensorFlow"

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes and 3 GB, once"
# As a path, not a finder: type checkers of scripts elsewhere find the package, too.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --config-settings editable_mode=compat -e '.[dev]'
	-@$(COMPILE) $(VENV)/lib
	@touch $@

# The demo has environments of its own, unless there is one for contributors already: the first, without TensorFlow, shows
# something while the second is installed. They are two, because pip may replace packages that a running command imports.
PIP = -m pip install --disable-pip-version-check --no-compile --config-settings editable_mode=compat
DEMO_BIN = $(if $(wildcard $(STAMP)),$(BIN),build/demo/bin)

demo: build/demo/.begun
	@$(DEMO_BIN)/python examples/ranker/demo.py

demo-digits: build/demo/.begun
	@test $(DEMO_BIN) = $(BIN) || build/demo/bin/python $(PIP) --quiet -e '.[server,agent,serving-api]'
	@$(DEMO_BIN)/python examples/digits/demo.py

.PHONY: build/demo/.begun
ifneq ($(wildcard $(STAMP)),)
build/demo/.begun:
	@$(BIN)/python examples/first/demo.py
	@echo
else
build/demo/.begun: build/first/.installed
	@$(MAKE) --no-print-directory --silent build/demo/.installed > build/demo.log 2>&1 & installing=$$!; \
	build/first/bin/python examples/first/demo.py; \
	tail -n +1 -f --pid=$$installing build/demo.log & \
	wait $$installing || { echo "error: see build/demo.log"; exit 1; }
	@echo
endif

build/first/.installed: pyproject.toml deploy/requirements-slim.txt
	@echo "1 of 2: everything but TensorFlow into build/first, 60 MB"
	@$(PYTHON) -m venv build/first
	@build/first/bin/python $(PIP) -r deploy/requirements-slim.txt
	@build/first/bin/python $(PIP) --quiet --no-deps -e .
	@touch $@

build/demo/.installed: pyproject.toml
	@echo "2 of 2: TensorFlow and the rest into build/demo, 600 MB"
	@$(PYTHON) -m venv build/demo
	@build/demo/bin/python $(PIP) -e '.[server,agent]'
	@touch $@

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

unit: $(STAMP)
	@$(COMPILE) exporter serving tests/support
	$(PYTEST) -m 'not landing'

test-all: $(STAMP)
	@$(COMPILE) exporter serving tests/support
	$(PYTEST) -m landing

durations: $(STAMP)
	RECORD_DURATIONS=1 $(PYTEST) -m 'not landing'
	RECORD_DURATIONS=1 $(PYTEST) -m landing

thorough: $(STAMP)
	@$(COMPILE) exporter serving tests/support
	THOROUGH=1 $(PYTEST)
	MAPPED_BASES=1 $(PYTEST) tests/subgraph tests/integration/test_incremental_server.py

build/azurite:
	@mkdir -p $@.new
	@npm install --silent --no-audit --no-fund --prefix $@.new azurite@3.35
	@mv $@.new $@

stores: $(STAMP) build/azurite
	$(BIN)/python -m pytest tests/storage tests/transfer

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; with search: $(PYTHON) -m http.server -b 127.0.0.1 -d build/site"

pictures: $(STAMP)
	$(BIN)/python -m tests.support.status_pages docs/assets build/pictures

engines: $(STAMP)
	$(BIN)/python -m pytest -s tests/integration/engines.py

soak: $(STAMP)
	$(BIN)/python -m pytest -s tests/integration/soak_increments.py tests/integration/soak_old_trainers.py

fuzz: $(STAMP)
	$(BIN)/python -m pytest -s tests/fuzz_files.py tests/serving/test_lying_servers.py tests/serving/test_bad_http.py

chaos: $(STAMP)
	$(BIN)/python -m pytest -s tests/integration/chaos.py

rehearsal: $(STAMP)
	@$(BIN)/python -m tests.support.rehearsal $(ONLY)

isolation: $(STAMP)
	$(BIN)/python -m pytest -s tests/integration/isolation.py

MINUTES ?= 10
faults: $(STAMP)
	FAULT_MINUTES=$(MINUTES) $(BIN)/python -m pytest -s tests/integration/faults.py

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks '$(ONLY)' --scale $(or $(SCALE),1)

# Two tools in an environment of their own: what builds by pyproject.toml, and what lists an environment.
build/release/.installed:
	@$(PYTHON) -m venv build/release
	@build/release/bin/python -m pip install --quiet 'build>=1.2' 'cyclonedx-bom>=6'
	@touch $@

release: build/release/.installed
	@build/release/bin/python -m tools.release

build/lock/.installed:
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet 'uv>=0.9,<1'
	@touch $@

# The image's Python and C library. Hashes are of all files of a version, so that arm64 installs by the same lock.
LOCK = build/lock/bin/uv pip compile --quiet --upgrade --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28
lock: build/lock/.installed
	$(LOCK) pyproject.toml --extra agent --extra stores --extra signing --output-file deploy/requirements.lock
	$(LOCK) deploy/requirements-slim.txt --constraints deploy/requirements.lock --output-file deploy/requirements-slim.lock

matrix: $(STAMP)
	$(BIN)/python -m tests.matrix

matrix-short: $(STAMP)
	$(BIN)/python -m tests.matrix --short

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
