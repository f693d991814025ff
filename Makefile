# Everything starts here: `make` lists the commands. Needs Python 3.11 or newer and GNU make 3.81; recipes are POSIX sh.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8888
# A pip index to take torch from, e.g. https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX ?=
LAB_FLAGS ?=
ARGS ?=
# `make lock` resolves everything else around this pair: a CUDA build of torch 2.13.0 accepts no other triton.
LOCK_TORCH = torch==2.13.0 triton==3.7.1

BIN = $(VENV)/bin
STAMP = $(VENV)/.set-up
# Set-up is done again when one of these changes: what to install, and where (scripts in a venv hold its path).
STATE = $$(cat pyproject.toml constraints.txt | cksum) $(CURDIR)
# Half a second instead of pip's five: the packages are there, and the engine is found from any folder (-I).
HEALTHY = import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("minillm", "pip", "torch", "jupyterlab", "pytest"))))
LOCK_VENV = .venv-lock

.PHONY: help setup install lab test test-fast lint gpu-check demo bench doctor lock clean
.DEFAULT_GOAL = help

help:
	@echo 'make lab         set up, then open the course in JupyterLab    (PORT=8888)'
	@echo 'make test        set up, then run every test'
	@echo 'make demo        set up, then watch the engine answer a question and explain its speed'
	@echo 'make setup       make $(VENV), install, fetch the default model (PYTHON=python3.12, TORCH_INDEX=https://...)'
	@echo 'make doctor      say what works on this machine and what to do about the rest'
	@echo 'make test-fast   the tests of a working day, three minutes'
	@echo 'make lint        ruff and mypy'
	@echo 'make gpu-check   kernels and engine on this GPU: tests, then speed, eight minutes; says so where there is none'
	@echo 'make bench       measure this machine against its peers         (ARGS="...")'
	@echo 'make lock        write constraints.txt anew from the newest versions allowed'
	@echo 'make clean       remove $(VENV) and caches; keeps the model and your progress'

setup:
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(STATE)" ] || ! $(BIN)/python -I -c '$(HEALTHY)' 2>/dev/null; \
	  then $(MAKE) --no-print-directory install; fi
	@$(BIN)/python -m minillm.model.fetch >/dev/null

# A set-up that did not finish leaves no stamp, and its environment is made anew; pip's cache makes that cheap.
install:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name yours: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "minillm needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name a newer one: make setup PYTHON=python3.12" % (v[0], v[1]))'
	@case "$$(cat $(STAMP) 2>/dev/null)" in \
	  *' $(CURDIR)') $(BIN)/python -I -m pip --version >/dev/null 2>&1 || rm -f $(STAMP);; \
	  *) rm -f $(STAMP);; esac
	@if [ -f $(STAMP) ]; then rm -f $(STAMP); else echo 'Making $(VENV)'; $(PYTHON) -m venv --clear $(VENV); fi
	@if [ -z '$(TORCH_INDEX)' ] && [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  echo 'There is no NVIDIA driver here. If pip goes on to fetch nvidia packages (several GB), stop it and take the small build'; \
	  echo 'of torch: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu'; fi
	@if [ -n '$(TORCH_INDEX)' ]; then $(BIN)/python -m pip install --no-deps -c constraints.txt --index-url '$(TORCH_INDEX)' torch; fi
	$(BIN)/python -m pip install -c constraints.txt -e '.[course,test]'
	@printf '%s\n' "$(STATE)" > $(STAMP)

# The settings file lies inside the environment, so that a reader's own JupyterLab settings stay as they are.
# A container's root may start the server; other people may not become root by it.
lab: setup
	@mkdir -p $(VENV)/share/jupyter/lab/settings && cp assets/jupyterlab.json $(VENV)/share/jupyter/lab/settings/overrides.json
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m jupyterlab --port=$(PORT) $$([ "$$(id -u)" != 0 ] || echo --allow-root) \
	  --ServerApp.root_dir='$(CURDIR)' --LabApp.default_url=/lab/tree/chapters/README.md $(LAB_FLAGS)

test: setup
	@$(BIN)/python .ci/groups.py $(ARGS)

test-fast: setup
	@$(BIN)/python .ci/groups.py --fast $(ARGS)

lint: setup
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy

gpu-check: setup
	@$(BIN)/python tests/gpu/check.py $(ARGS)

demo bench doctor: setup
	@$(BIN)/minillm $@ $(ARGS)

# Local builds such as 2.13.0+cpu are written as the release they are a build of.
lock:
	$(PYTHON) -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install $(LOCK_TORCH) -e '.[course,test]'
	@{ echo "# What minillm was tested with on $$(date +%Y-%m-%d): $$($(LOCK_VENV)/bin/python --version), $$(uname -sm)."; \
	   echo '# A constraint installs nothing; it picks the version of what is needed. Regenerate with: make lock'; \
	   $(LOCK_VENV)/bin/python -m pip list --format=freeze --exclude pip --exclude minillm | sed 's/+.*//'; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(LOCK_VENV)

clean:
	rm -rf $(VENV) $(LOCK_VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
