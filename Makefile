# Two commands: make demo, make test. Everything is installed into .venv from pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test lint lint-cpp tidy fuzz links ptx install browser provider bindings survey cpp bench clean

install: $(VENV)/.installed

# torch first and by itself: as a dependency of another package, pip would take the newest build, with gigabytes of CUDA
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch==2.13.0
	$(PIP) -c constraints.txt setuptools wheel
	$(PIP) -c constraints.txt --no-build-isolation -e ".[export,tensorrt-rtx,validate,dev]"
	touch $@

demo: install
	$(BIN)/python examples/e2e/demo.py

# two processes, each file in one of them: the tests of a file share what they export
test: install browser provider bindings cpp
	$(BIN)/pytest --numprocesses 2 --dist loadfile

# the C++ library, its tests and examples: optimised, and with the sanitizers that the tests run them under
cpp: install
	runtime/cpp/get_dependencies.sh build/cpp/deps $(BIN)/python
	cd runtime/cpp && for preset in release address thread; do \
	  cmake --preset $$preset >/dev/null && cmake --build --preset $$preset -- --quiet || exit 1; done

# skip-validate's report is tested in a real browser; if this cannot install one, those tests are skipped and say why
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	{ test "$$(id -u)" -eq 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	echo "no chromium and chromium-driver: the report's tests will be skipped" >&2

# ONNX Runtime with its CUDA provider, next to the installed one. Tests run it on stand-ins for CUDA and its driver; where it is
# not available (on machines other than x86-64), they are skipped and say why
provider: install
	@test -d build/onnxruntime-gpu/onnxruntime || \
	$(PIP) --no-deps --target build/onnxruntime-gpu onnxruntime-gpu==1.31.1 || \
	echo "no onnxruntime-gpu: tests of its CUDA provider will be skipped" >&2

# TensorRT's Python bindings, in the first supported version and the last on PyPI: tests look up the package's names in them
bindings: install
	@for version in 10.15.1.29 11.4.0.106; do test -d build/tensorrt-$$version/tensorrt_bindings || \
	$(PIP) --no-deps --target build/tensorrt-$$version tensorrt-cu13-bindings==$$version || \
	echo "no tensorrt-cu13-bindings $$version: tests of the target tensorrt will be skipped" >&2; done

# slow, and not part of CI: tests every architecture, and the cuda engines of each on that provider. The suite has only those
# architectures that together take every path of the exporter
survey: provider
	$(BIN)/pytest -m survey --numprocesses 2
	rm -rf build/survey && $(BIN)/python -m tests.standin.survey build/survey

# the turn-around's kernel as PTX, for runtimes without a compiler; commit the changed file
ptx: install
	$(BIN)/python -c "from skipdecode.plugins import turnaround; turnaround.write_ptx()"

# links that show type checkers one package, as setuptools makes it of several folders
links:
	rm -rf .typing && mkdir -p .typing/skipdecode
	for entry in runtime/* exporter graph_passes plugins; do ln -s ../../$$entry .typing/skipdecode/; done

lint: install links lint-cpp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.typing $(BIN)/mypy -p skipdecode

CPP_FILES := $(wildcard runtime/cpp/include/skipdecode/* runtime/cpp/src/* tests/cpp/*.cc tests/cpp/*.h tests/cpp/*.c examples/cpp_*/*.cc examples/cpp_*/*.h tests/plugins/*.cc tests/standin/*.cc tests/standin/*.h \
  plugins/*/*.h plugins/*/*.cu)

lint-cpp:
	@command -v clang-format >/dev/null || { test "$$(id -u)" -eq 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-format >/dev/null; } || \
	{ echo "lint-cpp needs clang-format: install it and run this again" >&2; exit 2; }
	clang-format --dry-run -Werror $(CPP_FILES)

# slow, and not part of CI: clang-tidy over the library (its rules: runtime/cpp/.clang-tidy)
tidy: cpp
	clang-tidy -p build/cpp/release --quiet $(wildcard runtime/cpp/src/*.cc)

# libFuzzer on the manifest's parser, since manifests are not trusted (needs clang and libclang-rt-dev); findings join the corpus
SECONDS_OF_FUZZING ?= 600
fuzz: cpp
	mkdir -p build/cpp/fuzz/found && $(BIN)/python -m zipfile -e tests/cpp/corpus.zip build/cpp/fuzz/corpus
	clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I runtime/cpp/include -I runtime/cpp/src \
	  tests/cpp/fuzz_manifest.cc $(addprefix runtime/cpp/src/,error.cc manifest.cc manifest_check.cc schedule.cc strict_json.cc) \
	  -o build/cpp/fuzz/fuzz
	build/cpp/fuzz/fuzz -max_total_time=$(SECONDS_OF_FUZZING) -dict=tests/cpp/manifest.dict build/cpp/fuzz/found build/cpp/fuzz/corpus
	build/cpp/fuzz/fuzz -merge=1 build/cpp/fuzz/corpus build/cpp/fuzz/found
	rm tests/cpp/corpus.zip && $(BIN)/python -m zipfile -c tests/cpp/corpus.zip build/cpp/fuzz/corpus/*

# pip builds llama.cpp here, and fetches the tools for that
bench: install
	$(PIP) -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf $(VENV) .typing demo build *.egg-info
