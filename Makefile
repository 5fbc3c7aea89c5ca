# Every target does the set-up that it needs. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
# Where shims for the installed frameworks are kept; the user's own cache by default.
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Ranks share the cores: without this each would start as many threads as there are cores.
export OMP_NUM_THREADS := 1
# A build for this checkout, whatever virtual environment or conda is active outside.
MATURIN := env -u CONDA_PREFIX VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin

RUST_SOURCES := $(shell find rust-core cpp-shims python/src python/build.rs torch_ext tf_ops -name target -prune -o -type f -print 2>/dev/null) \
	Cargo.toml Cargo.lock python/Cargo.toml pyproject.toml
CPP_SOURCES := $(shell find cpp-shims torch_ext tf_ops -name '*.h' -o -name '*.cc' 2>/dev/null)
# cargo-nextest gives each test a time limit and its own process; plain `cargo test` runs the same tests.
CARGO_TEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo 'cargo nextest run' || echo 'cargo test')

.PHONY: help demo test check bench bench-faults develop clean test-rust test-python test-install format generated

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/develop $(STAMPS)/torch $(STAMPS)/demo ## Train on real digits with 2 processes and compare with 1 process and with gloo
	$(BIN)/python examples/demo.py

test: $(STAMPS)/develop $(STAMPS)/torch $(STAMPS)/tf $(STAMPS)/system test-rust test-python ## Run every test

test-rust: ## Run the tests of the Rust crates
	$(CARGO_TEST) --locked -p smd-core -p smd-bridge

test-python: $(STAMPS)/develop $(STAMPS)/torch $(STAMPS)/tf $(STAMPS)/system ## Run the tests in tests/
	$(BIN)/python -m pytest

bench-faults: $(STAMPS)/develop $(STAMPS)/torch ## Kill random ranks at random moments, 200 times; RUNS= and SEED= change that
	$(BIN)/python tests/faults/kill.py --runs $(or $(RUNS),200) --seed $(or $(SEED),0)

check: $(STAMPS)/develop $(STAMPS)/lint ## Formats, lints, generated files and fast tests
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CPP_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES))
	$(CARGO_TEST) --locked -p smd-core -p smd-bridge
	$(BIN)/python -m pytest tests/unit

format: $(STAMPS)/lint ## Bring all sources into the form that `make check` wants
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_SOURCES),$(BIN)/clang-format -i $(CPP_SOURCES))

generated: ## Bring generated files up to date
	SMD_UPDATE_GENERATED=1 cargo test --quiet --locked -p smd-core --lib config::

develop: $(STAMPS)/develop ## Build the library and install this checkout into .venv

clean: ## Remove what was built, and .venv
	cargo clean
	rm -rf $(VENV) build dist python/smdistributed/_core*.so

# --- set-up, each step once -------------------------------------------------------------------------------------

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "OpenSMD needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/base: constraints.txt | $(STAMPS)/venv
	$(PIP) maturin pytest pytest-timeout
	touch $@

$(STAMPS)/torch: constraints.txt | $(STAMPS)/base
	$(PIP) torch numpy
	touch $@

# tf-keras asks for the package `tensorflow`, a second copy of what tensorflow-cpu installs.
$(STAMPS)/tf: constraints.txt | $(STAMPS)/torch
	$(PIP) tensorflow-cpu
	$(PIP) --no-deps tf-keras
	touch $@

$(STAMPS)/demo: constraints.txt | $(STAMPS)/torch
	$(PIP) scikit-learn matplotlib rich
	touch $@

$(STAMPS)/lint: constraints.txt | $(STAMPS)/venv
	$(PIP) ruff clang-format
	touch $@

# Open MPI, for the tests that start ranks with mpirun: installed where that is possible, else those tests are skipped.
$(STAMPS)/system: | $(STAMPS)/venv
	@if command -v mpirun >/dev/null; then echo "mpirun: $$(command -v mpirun)"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends openmpi-bin; } \
		>/dev/null || echo "mpirun: could not be installed; its tests are skipped"; \
	else echo "mpirun: not found; its tests are skipped (install openmpi-bin)"; fi
	@touch $@

$(STAMPS)/develop: $(RUST_SOURCES) | $(STAMPS)/base
	$(MATURIN) develop --release --quiet
	touch $@
