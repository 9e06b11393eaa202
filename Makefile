# Thin on purpose: each target is one or two lines; what they run lives in pyproject.toml, scripts/ and benchmarks/.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: demo test check bench docs clean
demo: $(STAMP)         ## watch real reward jobs run on warm pods (about 90 s)
	$(PY) -m benchmarks.demo $(ARGS)
test: $(STAMP)         ## the whole test suite (about 10 minutes at most)
	$(PY) -m pytest $(ARGS)
check: $(STAMP)        ## style, types and floors
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && $(VENV)/bin/lint-imports
bench: $(STAMP)        ## one benchmark: make bench NAME=warm_start [QUICK=1]
	$(PY) -m benchmarks $(NAME) $(if $(QUICK),--quick)
docs: $(STAMP)         ## redraw the diagrams from the tables in the code
	$(PY) -m benchmarks.diagrams
clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(STAMP): pyproject.toml scripts/bootstrap
	bash scripts/bootstrap $(VENV) && touch $@
