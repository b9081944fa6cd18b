# Everything runs in .venv, installed through constraints.txt; nothing else on the machine is touched.
# OMP_WAIT_POLICY: spinning threads starve each other on a shared machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install demo test clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo 'harp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' && false)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,report,images,vision,track,export]"
	touch $(STAMP)

demo: install
	$(BIN)/python -m harp demo

test: install
	scripts/check

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
