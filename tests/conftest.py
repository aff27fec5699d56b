"""Fixtures of all tests: the zoo, traces that are made once, one torch thread, rarer garbage collections, and what is compiled
once: the turn-around's host version, and a stand-in for the GPU's driver."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch._export import utils as export_utils
from torch.onnx._internal.exporter._registration import ONNXRegistry

from skipdecode.exporter import dry_run, graphs
from skipdecode.plugins import turnaround
from tests.builders import building_here
from tests.once import made_once, shared_folder
from tests.standin import driver
from tests.zoo import Zoo


def pytest_configure() -> None:
    """Let processes that tests interrupt see Ctrl-C, also where a shell has started pytest in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _model(config: Any) -> dict[str, Any]:
    """The settings that a model's graphs depend on: not where its checkpoint is, nor how that stores its numbers."""
    return {**config.to_dict(), "_name_or_path": "", "dtype": None, "quantization_config": None}


def _run_once(check: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """`check`, which does not run again for a configuration that it has accepted; `folder` holds a file for each."""

    def checked(config: Any) -> None:
        accepted = folder / f"{check.__name__}-{_digest(_model(config))}"
        if not accepted.exists():
            check(config)
            accepted.touch()

    return checked


def _digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()


def _traced_once(trace: Callable[..., Sequence[ir.Model]], folder: Path) -> Callable[..., tuple[ir.Model, ...]]:
    """`trace`, which runs once per configuration and dtype and keeps its graphs in `folder`; each call loads its own copies."""

    def traced(bones: graphs.Skeleton, weights: graphs.WeightFile) -> tuple[ir.Model, ...]:
        def write(partial: Path) -> None:
            partial.mkdir(exist_ok=True)  # a failed trace leaves it behind
            # traces have shapes with symbols, which the cache finds more slowly than torch computes them
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                for index, graph in enumerate(trace(bones, weights)):
                    ir.save(graph, partial / f"{index:03d}.onnx")

        kept = made_once(folder / f"{trace.__name__}-{_digest((bones.dtype, _model(bones.config)))}", write)
        found = tuple(ir.load(path) for path in sorted(kept.iterdir()))
        for graph in found:
            graphs._link_weights(graph, bones, weights)
        return found

    return traced


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for torch, the oracle: two pytest processes with two threads each wait for one another on two cores."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the commands that tests start
        yield


@pytest.fixture(scope="session", autouse=True)
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely: a full collection walks all of torch and transformers for a third of a second.

    Exports would spend a tenth of their time in it.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share traced graphs among pytest's processes: tracing the same few models is nine tenths of a tiny model's export.

    They share what the exporter itself writes to a bundle's graphs/. Commands run in their own processes and trace again.
    """
    folder = shared_folder(tmp_path_factory) / "traces"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("layer_graphs", "outer_graphs"):
            patch.setattr(f"skipdecode.exporter.export.{name}", _traced_once(getattr(graphs, name), folder))
        patch.setattr("skipdecode.exporter.export.check_runs", _run_once(dry_run.check_runs, folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_traces() -> Iterator[None]:
    """Cache what torch repeats for each graph.

    torch.onnx reads the source of its 500 operators for each graph again, which takes as long as tracing a small one.
    torch.export lists its operators some 28 times.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        patch.setattr(export_utils, "_materialize_cpp_cia_ops", functools.cache(export_utils._materialize_cpp_cia_ops))
        yield


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = shared_folder(tmp_path_factory) / "zoo"
    folder.mkdir(exist_ok=True)
    return Zoo(folder)


@pytest.fixture(scope="session")
def conformance_bundle(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a bundle of tests/conformance/bundles.py by name, made on first use."""
    from tests.conformance.bundles import make

    folder = shared_folder(tmp_path_factory)
    return lambda name: made_once(folder / f"conformance-{name}", lambda partial: make(name, zoo, partial))


@pytest.fixture(scope="session")
def turnaround_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The turn-around's host version."""
    return turnaround.build(tmp_path_factory.mktemp("host") / "turnaround.so", device=False)


@pytest.fixture(scope="module")
def built_here() -> Iterator[None]:
    """TensorRT's plans are built in this process; tests/graph_passes/test_builder_process.py is about builders in their own."""
    with building_here():
        yield


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that stands in for NVIDIA's driver."""
    return driver.build(tmp_path_factory.mktemp("driver"))
