# make demo    see it work (KEEP=1 leaves it running, ROWS=1000000 makes it bigger)
# make test    all tests
# make bench   the benchmark: ratios against PostgreSQL's own tools (ROWS, CHANGES,
#              TRANSACTIONS, RUNS, WORK choose what is measured, JSON=FILE keeps it;
#              WORK=memory: what the process has resident at most)
# make chaos   the host is killed and cut off for MINUTES=60, and the ends compared;
#              SEED=N repeats a run, ONLY=NAME one place or fault
# make schema-matrix
#              every case of a schema change on every major of PostgreSQL, one line each:
#              ONLY=capture|plan|apply|silent one part, MAJORS=15,18 those, CASE=TEXT what contains it
# make hostile a plugin does its worst, one way after the other: what the host did, what
#              it cost the others, what was lost; ONLY=NAME,NAME runs some,
#              KEPT=0 does not judge the cost
#
# `setup` installs what is missing on Debian 12 or Ubuntu; rustup has to be there.

# One directory for all checkouts: wasmtime is compiled once.
export CARGO_TARGET_DIR ?= $(HOME)/.cache/tidegate/target
export TIDEGATE_VENV ?= $(HOME)/.cache/tidegate/venv
export TIDEGATE_PLUGINS ?= $(CURDIR)/plugins
export TIDEGATE_FIXTURES ?= $(CARGO_TARGET_DIR)/fixtures

# One profile serves demo, tests and benchmark (see Cargo.toml).
TIDEGATE := $(CARGO_TARGET_DIR)/debug/tidegate

.PHONY: demo test bench chaos schema-matrix hostile host plugins fixtures setup setup-tests lint

demo: plugins
	@$(TIDEGATE) demo --plugins $(TIDEGATE_PLUGINS) $(if $(KEEP),--keep) $(if $(ROWS),--rows $(ROWS))

test: setup-tests plugins fixtures
	@scripts/test

bench: fixtures
	@cargo build --quiet --release -p tidegate-fixture-count --example native
	@cargo run --quiet -p tidegate-tests --bin bench

chaos: plugins
	@MINUTES=$(or $(MINUTES),60) cargo run --quiet -p tidegate-tests --bin chaos

schema-matrix: setup-tests plugins fixtures
	@ONLY=$(ONLY) MAJORS=$(MAJORS) CASE="$(CASE)" cargo run --quiet -p tidegate-tests --bin schema-matrix

hostile: fixtures
	@cargo run --quiet -p tidegate-tests --bin hostile

host: setup
	cargo build -p tidegate

# Into plugins/, beside their sources: where tidegate.toml looks by default.
plugins: host
	@$(TIDEGATE) plugin build plugins/postgres plugins/files --out $(TIDEGATE_PLUGINS)

fixtures: host
	@$(TIDEGATE) plugin build $(wildcard tests/fixtures/plugins/*) --out $(TIDEGATE_FIXTURES)

setup:
	@scripts/setup

setup-tests:
	@scripts/setup --tests

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
