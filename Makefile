# Everything runs in .venv, installed through constraints.txt; nothing else on the machine is touched.
# OMP_WAIT_POLICY: spinning threads starve each other on a shared machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_WAIT_POLICY ?= PASSIVE

# The argument of quick, coverage and slow: make quick PACKAGE=pruning
ONLY = $(if $(PACKAGE),"$(PACKAGE)")

.PHONY: install native demo docs test quick coverage slow clean

# Where the engine's C++ can't be compiled the package computes in torch: that is a warning here, an error in scripts/check.
install: $(STAMP)
	@$(BIN)/python src/harp/engine/native/build.py || echo 'harp: installed without native code'

# Compile the engine's C++ if it changed; quicker than another install.
native: $(STAMP)
	@$(BIN)/python src/harp/engine/native/build.py

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo 'harp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' && false)
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,report,images,vision,track,export,lightning,hub]"
	touch $(STAMP)

demo: install
	$(BIN)/python -m harp demo

# The documentation as a site in site/; open site/index.html.
docs: install
	@$(BIN)/python scripts/build-docs

test: install
	scripts/check

# Checks and the tests of what changed since the last commit.
quick: $(STAMP)
	@$(BIN)/python scripts/quick $(ONLY)

# Branch coverage by package; fails below scripts/coverage-floor.json.
coverage: install
	@$(BIN)/python scripts/coverage $(ONLY)

# The tests marked slow, in parts; what passed at this commit is not run again. Results: tests/slow-results.json
slow: install
	@$(BIN)/python scripts/slow $(ONLY)

clean:
	rm -rf site .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/harp/engine/native/_native.*
