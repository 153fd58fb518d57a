.PHONY: demo test bench

PYTHON ?= python3
export OMP_NUM_THREADS ?= 1

demo: .venv/ready
	.venv/bin/python examples/multihead_attention.py

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -q -n 2 -m "not slow"

bench: .venv/ready
	.venv/bin/python benchmarks/overhead.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,plot]"
	touch $@
