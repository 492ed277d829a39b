# Everything starts from a fresh clone: each target first makes what it needs.
# Python: `make PYTHON=python3.12 setup` chooses one. Workers of the tests: `make WORKERS=4 test`.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
# Two package managers at once would only wait for each other.
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
KAFKA := .kafka
ARGS ?=
BESIDE ?= $(SETUP_STAMP)
# One more than there are cores: tests that kill, start and wait leave half of a core to others.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n > 3 ? 4 : n + 1)))

# These tests wait for timers and disks more than for processors, and need little memory.
check: WORKERS = 4

# With 0 mypy starts no processes: it waits for them for some seconds only, too short a time where
# others need the processors.
MYPY_WORKERS ?= 2

TEST_OPTIONS = --workers $(WORKERS) --durations 20
# Without compiled modules each process that the tests start compiles them again.
unexport PYTHONDONTWRITEBYTECODE

# Modules are compiled when they are first imported: most never are. pyspark has no wheel; the one
# that pip makes of it is unpacked at once, so it is not compressed.
PIP_OPTIONS := --quiet --disable-pip-version-check --retries 10 --no-compile \
	--config-settings=--build-option=--compression=stored

SETUP_STAMP := $(VENV)/.setup
WARM_STAMP := $(VENV)/.warm
COLLECTED_STAMP := $(VENV)/.collected
JARS_STAMP := $(KAFKA)/.jars
CLASSES_STAMP := $(KAFKA)/.classes
ARCHIVE := $(KAFKA)/kafka.jsa
SPARK_JARS_STAMP := $(KAFKA)/.spark-jars
DEBEZIUM_STAMP := $(KAFKA)/.debezium
OPENSEARCH_STAMP := $(KAFKA)/.opensearch
DEBEZIUM := benchmarks/capture/debezium
OPENSEARCH := conformance/opensearch
JAVA_SOURCES := $(wildcard conformance/kafka/src/*.java)

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: system-packages $(SETUP_STAMP) ## Make .venv with everything, and install missing system packages

.PHONY: system-packages
system-packages:
	@scripts/system-packages.sh test

$(SETUP_STAMP): pyproject.toml constraints.txt
	@scripts/system-packages.sh python
	@python=$$(scripts/find-python.sh); echo "setup: $(VENV) with $$python"; "$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt \
		pyspark --editable '.[all,dev]'
	@touch $@

.PHONY: run
run: $(WARM_STAMP) ## Run the sample shop, live (options: make run ARGS='--seconds 60')
	@exec $(BIN)/python -m tools.demo $(ARGS)

# What the first start of Spark, and of compiled code, would do while somebody waits for results;
# and what each worker of the tests would do for itself.
$(WARM_STAMP): $(SETUP_STAMP)
	@scripts/system-packages.sh java
	@echo "setup: compiling, and making the class archive of Spark, once: about a minute"
	@$(BIN)/python -m tools.warm
	@touch $@

# Installing takes a processor, fetching the network, and what is made of it a processor again.
# BESIDE names what else is to be made as soon as .venv is there, while a processor is free.
.PHONY: prepare
prepare: system-packages ## Install, compile, and fetch the servers that the tests need
	@scripts/together.sh '$(MAKE) --no-print-directory $(SETUP_STAMP); \
		scripts/together.sh "$(MAKE) --no-print-directory $(WARM_STAMP) $(COLLECTED_STAMP)" \
			"$(MAKE) --no-print-directory $(BESIDE)"' \
		'$(MAKE) --no-print-directory kafka-jars opensearch-jars databases'

# Each worker would compile all test modules for itself.
$(COLLECTED_STAMP): $(WARM_STAMP)
	@$(BIN)/pytest --collect-only -qq >/dev/null || true
	@touch $@

.PHONY: check
check: lint ## Run `make lint` and every test that starts no process
	@$(BIN)/python -m tests.harness check $(TEST_OPTIONS) $(ARGS)

.PHONY: test
test: prepare ## Run all tests but the long ones, without lint (some: make test ARGS='tests/log -k recovery')
	@$(BIN)/python -m tests.harness test $(TEST_OPTIONS) $(ARGS)

.PHONY: proof
proof: lint prepare ## Run `make lint` and all tests at length: kills by the dozen, fuzzing by the hundred thousand, soaks
	@$(BIN)/python -m tests.harness proof $(TEST_OPTIONS) --timeout 7200 $(ARGS)

.PHONY: coverage
coverage: prepare ## Run `make test` and report the lines that it executes, child processes included
	@rm -rf .coverage && mkdir .coverage
	@$(BIN)/coverage run -m tests.harness test $(TEST_OPTIONS) --timeout 600 $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --skip-covered --skip-empty --sort miss

.PHONY: conformance
conformance: setup kafka-jars ## Run the same scenarios on the embedded broker and on Apache Kafka
	@$(BIN)/pytest conformance $(ARGS)

.PHONY: lint
lint: $(SETUP_STAMP) ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict --num-workers $(MYPY_WORKERS)

.PHONY: format
format: $(SETUP_STAMP) ## Format the code and mend what can be mended without thought
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

.PHONY: bench
bench: bench-broker bench-consumers bench-spark bench-capture bench-processing bench-sync bench-live ## Run every benchmark

.PHONY: bench-broker
bench-broker: setup kafka-jars ## Compare the broker with Kafka, NATS, RabbitMQ and Redis
	@scripts/bench-packages.sh || true
	@$(BIN)/python -m benchmarks.broker $(ARGS)

.PHONY: bench-consumers
bench-consumers: setup kafka-jars ## Compare groups, transactions and queues with Kafka and RabbitMQ
	@scripts/bench-packages.sh || true
	@$(BIN)/python -m benchmarks.consumers $(ARGS)

.PHONY: bench-spark
bench-spark: setup spark-jars ## Compare source, sink and latency with Spark's own Kafka connector
	@$(BIN)/python -m benchmarks.spark $(ARGS)

.PHONY: bench-capture
bench-capture: setup debezium-jars ## Compare capture with Debezium's embedded engine
	@$(BIN)/python -m benchmarks.capture $(ARGS)

.PHONY: bench-processing
bench-processing: setup spark-jars ## Compare windows, joins, views and patterns with plain Spark
	@$(BIN)/python -m benchmarks.processing $(ARGS)

.PHONY: bench-sync
bench-sync: setup ## Measure how soon and how fast derived stores follow a database
	@$(BIN)/python -m benchmarks.sync $(ARGS)

.PHONY: bench-live
bench-live: setup ## Measure how live the whole shop is, and fifty small flows
	@$(BIN)/python -m benchmarks.live $(ARGS)

.PHONY: databases
databases: ## Install the database servers that the tests need
	@scripts/system-packages.sh test
	@scripts/mysql-server.sh

.PHONY: kafka-jars
kafka-jars: $(CLASSES_STAMP) $(ARCHIVE) ## Fetch Apache Kafka's jars and compile its test client

$(JARS_STAMP): conformance/kafka/pom.xml
	@scripts/system-packages.sh test
	@echo "kafka-jars: fetching into $(KAFKA)/jars"
	@rm -rf $(KAFKA)/jars
	@mvn --quiet --batch-mode -Dmaven.wagon.http.retryHandler.count=10 --file $< \
		dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory='$(CURDIR)/$(KAFKA)/jars'
	@touch $@

$(CLASSES_STAMP): $(JAVA_SOURCES) $(JARS_STAMP)
	@rm -rf $(KAFKA)/classes
	@javac --release 17 -Xlint:all -Werror -proc:none -d $(KAFKA)/classes -cp '$(KAFKA)/jars/*' $(JAVA_SOURCES)
	@touch $@

# Each start of Kafka takes half as long with it; without it all works as well.
$(ARCHIVE): $(JARS_STAMP) scripts/kafka-archive.sh
	@scripts/kafka-archive.sh $(KAFKA) || echo "kafka-jars: there is no class archive, Kafka starts slowly"

.PHONY: spark-jars
spark-jars: $(SPARK_JARS_STAMP) ## Fetch Spark's own Kafka connector, for comparison

$(SPARK_JARS_STAMP): conformance/spark/pom.xml
	@scripts/system-packages.sh test
	@echo "spark-jars: fetching into $(KAFKA)/spark-jars"
	@rm -rf $(KAFKA)/spark-jars
	@mkdir -p $(KAFKA)
	@mvn --quiet --batch-mode -Dmaven.wagon.http.retryHandler.count=10 --file $< \
		dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory='$(CURDIR)/$(KAFKA)/spark-jars'
	@touch $@

.PHONY: debezium-jars
debezium-jars: $(DEBEZIUM_STAMP) ## Fetch Debezium's embedded engine, for comparison

$(DEBEZIUM_STAMP): $(DEBEZIUM)/pom.xml $(DEBEZIUM)/DebeziumBench.java
	@scripts/system-packages.sh test
	@echo "debezium-jars: fetching into $(KAFKA)/debezium"
	@rm -rf $(KAFKA)/debezium
	@mkdir -p $(KAFKA)
	@mvn --quiet --batch-mode -Dmaven.wagon.http.retryHandler.count=10 --file $< \
		dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory='$(CURDIR)/$(KAFKA)/debezium'
	@javac --release 17 -Xlint:all -Werror -proc:none -d $(KAFKA)/debezium -cp '$(KAFKA)/debezium/*' \
		$(DEBEZIUM)/DebeziumBench.java
	@touch $@

.PHONY: opensearch-jars
opensearch-jars: $(OPENSEARCH_STAMP) ## Fetch OpenSearch's jars and compile the node that tests start

$(OPENSEARCH_STAMP): $(OPENSEARCH)/pom.xml $(OPENSEARCH)/SearchNode.java
	@scripts/system-packages.sh test
	@echo "opensearch-jars: fetching into $(KAFKA)/opensearch"
	@rm -rf $(KAFKA)/opensearch
	@mkdir -p $(KAFKA)
	@mvn --quiet --batch-mode -Dmaven.wagon.http.retryHandler.count=10 --file $< \
		dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory='$(CURDIR)/$(KAFKA)/opensearch'
	@javac --release 17 -proc:none -d $(KAFKA)/opensearch -cp '$(KAFKA)/opensearch/*' \
		$(OPENSEARCH)/SearchNode.java
	@touch $@

.PHONY: clean
clean: ## Remove what was made, the environment and the jars included
	rm -rf $(VENV) $(KAFKA) .mysql .mysql.part build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
