# Two commands: make demo, make test. Everything is installed into .venv from pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test lint links install browser cpp bench clean

install: $(VENV)/.installed

# torch first and alone: asked for through another package, the newest build with gigabytes of CUDA comes
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch==2.13.0
	$(PIP) -c constraints.txt setuptools wheel
	$(PIP) -c constraints.txt --no-build-isolation -e ".[export,validate,dev]"
	touch $@

demo: install
	$(BIN)/python examples/e2e/demo.py

test: install browser cpp
	$(BIN)/pytest

# the C++ library, its tests and examples: optimised, and with the sanitizers that the tests run them under
cpp: install
	runtime/cpp/get_dependencies.sh build/cpp/deps $(BIN)/python
	cd runtime/cpp && for preset in release address thread; do \
	  cmake --preset $$preset >/dev/null && cmake --build --preset $$preset -- --quiet || exit 1; done

# skip-validate's report is tested in a real browser; where this cannot install one, those tests say so and are skipped
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	{ test "$$(id -u)" -eq 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	echo "no chromium and chromium-driver: the report's tests will be skipped" >&2

# what type checkers see of the folders that setuptools maps to one package
links:
	rm -rf .typing && mkdir -p .typing/skipdecode
	for entry in runtime/* exporter graph_passes plugins; do ln -s ../../$$entry .typing/skipdecode/; done

lint: install links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.typing $(BIN)/mypy -p skipdecode

bench: install
	$(PIP) -c constraints.txt --no-build-isolation -e ".[bench]"
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf $(VENV) .typing demo build *.egg-info
