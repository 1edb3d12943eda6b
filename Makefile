PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
FRESH ?=
JOBS ?= 3
MINUTES ?= 5
SECONDS ?= 60
SEED ?=
SPARK ?= 4.0
TARGET ?= relay
OPTIONS ?=

.DEFAULT_GOAL := help
# Hundreds of processes start in the tests: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo console test test-jobs test-spark verify drills chaos test-codec test-images test-installs image lint bench soak lock clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## make .venv from the hash-pinned locks, with every command in .venv/bin; the codec is compiled if there is a compiler

# The project itself is installed again when its codec has changed.
$(VENV)/.installed: $(VENV)/.ready hatch_build.py relay/engine/send/compiled_frames.pyx
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.ready: requirements/build.txt requirements/dev.txt pyproject.toml
	@PYTHON=$(PYTHON) tests/support/packages python
	@echo "Making $(VENV) from the locks in requirements/ (once; a few minutes with the downloads)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-build-isolation --use-pep517 -r requirements/dev.txt
	@touch $@

demo: setup ## carry 69,659 real purchases from Spark to a consumer, and reconcile; FRESH=1 starts over
	@PYTHON=$(PYTHON) tests/support/packages demo
	@$(BIN)/python -m demo $(if $(FRESH),--fresh)

console: setup ## serve the web console of a shop with something in it, until Ctrl-C; it prints its address
	@PYTHON=$(PYTHON) tests/support/packages demo
	@$(BIN)/python -m demo.console

test: setup ## run every test on real servers, which are started for the run; JOBS=3 processes
	@PYTHON=$(PYTHON) tests/support/packages test
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile

# One job takes up to 90 s of two busy cores. A limit that a slow machine meets would end a test in a call of the JVM, whose
# answer the next call of that process would take for its own.
test-jobs: setup ## test whole Spark jobs, the demo, and what takes Spark long
	@PYTHON=$(PYTHON) tests/support/packages test
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --timeout 600 -m jobs

# An environment of its own with that PySpark, and the packages of .venv behind it; java.py finds a Java that each takes.
build/spark-%/.ready: requirements/pyspark-%.txt $(VENV)/.installed
	$(PYTHON) -m venv --clear --without-pip build/spark-$*
	printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		>"$$(build/spark-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	$(BIN)/pip --python build/spark-$*/bin/python install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--ignore-installed --no-build-isolation --use-pep517 -r requirements/pyspark-$*.txt
	@touch $@

# Before 4.2 Spark leaves sockets to the garbage collector, and 3.5 compares releases by what Python has given up.
SOCKETS := -W ignore::ResourceWarning
WARNINGS_3.5 := $(SOCKETS) -W "ignore:distutils Version classes"
WARNINGS_4.0 := $(SOCKETS)
WARNINGS_4.1 := $(SOCKETS)

test-spark: build/spark-$(SPARK)/.ready ## run the tests of Spark with another release of it: SPARK=3.5, 4.0, 4.1 or 4.2
	@PYTHON=$(PYTHON) tests/support/packages test
	build/spark-$(SPARK)/bin/python -m pytest $(WARNINGS_$(SPARK)) --timeout 600 $(OPTIONS) tests/spark

verify: ## run what .ci/run leaves out: every drill, four chaos seeds, the fuzz of the codec, the images, the extras, every release of Spark and five minutes of soak; about two hours
	$(MAKE) drills
	for seed in 1 2 3 4; do $(MAKE) chaos SEED=$$seed || exit 1; done
	$(MAKE) test-codec
	$(MAKE) test-images
	$(MAKE) test-installs
	for release in 3.5 4.0 4.1 4.2; do $(MAKE) test-spark SPARK=$$release || exit 1; done
	$(MAKE) soak

drills: setup ## run the tests that kill processes under load, need a cluster or a failover, or take long
	@PYTHON=$(PYTHON) tests/support/packages test
	$(BIN)/pytest -m drills

chaos: setup ## break everything at once under load for SECONDS=60, as SEED=7 decides (else drawn), and check each message
	@PYTHON=$(PYTHON) tests/support/packages test
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

test-codec: setup ## fuzz the compiled codec: built with gcc's address sanitizer, then with rows that PostgreSQL prints
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -R relay migrations build/sanitized/
	CFLAGS="-fsanitize=address -fno-omit-frame-pointer" $(BIN)/python hatch_build.py build/sanitized
	# Python's own allocator would hide a write behind a small object; what Python leaves allocated at its end is no leak.
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/pytest --hypothesis-profile fuzz --override-ini "pythonpath=build/sanitized . spark" --timeout 900 \
		tests/engine/test_frames.py tests/engine/test_codec_headers.py -k "not postgres"
	$(BIN)/pytest --hypothesis-profile fuzz --timeout 900 tests/engine/test_codec_headers.py -k postgres

test-images: setup ## test the images, compose.yaml and the engine with PostgreSQL 17 and RabbitMQ 4
	@PYTHON=$(PYTHON) tests/support/packages test
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/compose.txt
	$(BIN)/pytest -m images

test-installs: setup ## test each extra alone, oldest and newest, and the examples of Flask, Celery, FastStream and Node, from the package indexes
	@PYTHON=$(PYTHON) tests/support/packages test
	@PYTHON=$(PYTHON) tests/support/packages node
	$(BIN)/pytest -m installs

image: ## build the container image with docker, podman or buildah; TARGET=console or spark another one, OPTIONS=... for the build
	@config/build-image $(TARGET) $(OPTIONS)

bench: setup ## measure drain, latency, replay, consumer, publisher, table, console, pauses, several nodes, pools, a large batch, a lost binding and Spark, each next to a reference; about an hour
	@PYTHON=$(PYTHON) tests/support/packages bench
	for name in drain latency replay consume table console pauses nodes pool batch routes publisher spark spark_scale spark_read; do \
		$(BIN)/python -m bench.$$name || exit 1; \
	done

soak: setup ## 2,000 messages a second for 5 minutes, MINUTES=60 for an hour: fails on a loss, or when memory or table grow
	@PYTHON=$(PYTHON) tests/support/packages bench
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --check

lint: setup ## ruff, mypy strict, import contracts, the prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

lock: setup ## renew the locks from pyproject.toml
	requirements/renew

clean: ## remove .venv, caches and what the demo left
	rm -rf "$$(readlink -m .demo/postgres)" $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
