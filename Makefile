# Everything runs in .venv, installed through constraints.txt; nothing else on the machine is touched.
# OMP_WAIT_POLICY: spinning threads starve each other on a shared machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install native demo test clean

# Where the engine's C++ can't be compiled the package computes in torch: that is a warning here, an error in scripts/check.
install: $(STAMP)
	@$(BIN)/python src/harp/sparse/build.py || echo 'harp: installed without native code'

# Compile the engine's C++ if it changed; quicker than another install.
native: $(STAMP)
	@$(BIN)/python src/harp/sparse/build.py

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo 'harp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' && false)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,report,images,vision,track,export]"
	touch $(STAMP)

demo: install
	$(BIN)/python -m harp demo

test: install
	scripts/check

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/harp/sparse/_native.*
