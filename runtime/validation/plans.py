"""TensorRT's plans against ONNX Runtime, segment by segment, compared by polygraphy. Needs neither torch nor the checkpoint.

ONNX Runtime computes the bundle's standard graphs on the CPU, in their own dtype. It gets the same random inputs as the plan on
the GPU: those of a prompt's pass, and of a decode step on top of random keys and values. States are random in both passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skipdecode import bindings
from skipdecode import manifest as manifests
from skipdecode.device import HostDevice
from skipdecode.engines import Segment, bind_segment, tensorrt_library
from skipdecode.engines.ort import OrtEngine, use_threads
from skipdecode.errors import BundleError
from skipdecode.generate import Generator
from skipdecode.kv_buffer import key_shapes, keys_read, state_shapes
from skipdecode.memory import Array, DeviceMemory
from skipdecode.model import Model

TOLERANCE = 0.02  # relative to an output's largest value: fp16 sums in another order
_PROMPT = 24  # tokens

Feed = dict[str, np.ndarray[Any, Any]]
Infer = Callable[[Feed], Feed]


def measure_plans(generator: Generator) -> list[dict[str, Any]] | None:
    """The largest output error of each segment in each pass, lowest segment first. None: there is nothing to compare with.

    Raises:
        TargetError: polygraphy is not installed.
        BundleError: the bundle has been replaced, so that its graphs are not those of the loaded plans.
    """
    manifest = generator.manifest
    slim = all(variant.graph is None for variant in manifest.variants)
    if slim or generator.target.weights != "fp16":  # quantised, or bf16, which ONNX Runtime lacks on a CPU
        return None
    with manifests.one_bundle(generator.path):
        if manifests.read(generator.path) != manifest:
            raise BundleError("was replaced after it was loaded", "validate it again", where=str(generator.path))
        return _measure(generator)


def _measure(generator: Generator) -> list[dict[str, Any]]:
    manifest, engines, memory = generator.manifest, generator.engines, generator.engines.memory
    assert isinstance(memory, DeviceMemory) and engines.slots is not None
    graphs = generator.path / manifests.GRAPHS
    use_threads(None)
    device = HostDevice()
    on_cpu = DeviceMemory(device, manifest.dtype)
    rows = []
    for index, segment in enumerate(engines.segments):
        layers = segment.layers
        sources = [Segment((layer,), OrtEngine(graphs / f"layer_{layer:03d}.onnx", device=device)) for layer in layers]
        for title, tokens, valid in (("prompt", min(_PROMPT, manifest.limits.max_length // 2), 0), ("step", 1, _PROMPT)):
            feed = _feed(manifest.model, layers, engines.slots[layers[0]], tokens, valid)
            sides = (_chain(manifest.model, sources, on_cpu), _chain(manifest.model, [segment], memory))
            rows.append({"name": f"segment_{index:03d}", "pass": title, **_compare(generator.target.name, sides, feed)})
    return rows


def _feed(model: Model, layers: Sequence[int], slots: int, tokens: int, valid: int) -> Feed:
    """Random inputs: one row of `tokens` new tokens on top of `valid` ones; float16, states float32."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(0, 1, shape).astype(np.float16)

    valid = min(valid, slots - tokens)
    feed: Feed = {
        bindings.HIDDEN: floats(1, tokens, model.hidden_size),
        bindings.POSITION_IDS: np.arange(valid, valid + tokens, dtype=np.int64)[None],
    }
    for layer in layers:
        for name, shape in key_shapes(model, layer, slots).items():
            feed[name] = floats(1, *shape)
            feed[name][:, :, valid:] = 0
        for name, shape in state_shapes(model, layer).items():
            feed[name] = floats(1, *shape).astype(np.float32)
    for source, name in keys_read(model, layers):  # these already hold the new tokens' own
        feed[name] = floats(1, *key_shapes(model, source, slots)[name])
        feed[name][:, :, valid + tokens :] = 0
    return feed


def _chain(model: Model, segments: Sequence[Segment], memory: DeviceMemory) -> Infer:
    """A function that runs segments one on top of another; it returns the hidden state and what they keep, in fp32."""

    def infer(feed: Feed) -> Feed:
        arrays = {name: memory.twin(array)[0] for name, array in feed.items()}
        hidden = arrays[bindings.HIDDEN]
        inputs: dict[str, Array] = {bindings.HIDDEN: hidden, bindings.POSITION_IDS: arrays[bindings.POSITION_IDS]}
        outputs = {bindings.HIDDEN_OUT: hidden}
        for segment in segments:
            past = [name for layer in segment.layers for name in key_shapes(model, layer, 0) | state_shapes(model, layer)]
            read = {bindings.present(name): arrays[name] for _, name in keys_read(model, segment.layers)}
            bind_segment(segment.engine, inputs | read, hidden, [{name: arrays[name] for name in past}])()
            outputs |= {bindings.present(name): arrays[name] for name in past}
        return {name: memory.to_host(array) for name, array in outputs.items()}

    return infer


def _compare(target: str, sides: tuple[Infer, Infer], feed: Feed) -> dict[str, Any]:
    """Run both sides on the same inputs and compare every output, with polygraphy."""
    comparator, runner = _polygraphy(target)
    results = comparator.Comparator.run(
        [runner("ONNX Runtime", sides[0], feed), runner("plan", sides[1], feed)], data_loader=[feed]
    )
    largest = {name: float(np.abs(array).max()) for name, array in results[0][1][0].items()}
    tolerances = {name: TOLERANCE * value for name, value in largest.items()}
    compared = comparator.Comparator.compare_accuracy(
        results, compare_func=comparator.SimpleCompareFunc(atol=tolerances, rtol=0.0, check_error_stat="max")
    )
    ((_, (outcomes,)),) = next(iter(compared)).items()
    errors = {name: float(outcome.max_absdiff) / (largest[name] or 1.0) for name, outcome in outcomes.items()}
    worst = max(errors, key=errors.__getitem__)
    return {"output": worst, "relative_error": errors[worst], "holds": bool(compared)}


def _polygraphy(target: str) -> tuple[Any, Callable[[str, Infer, Feed], Any]]:
    base, comparator = (tensorrt_library.polygraphy(target, name) for name in ("backend.base", "comparator"))

    class Runner(base.BaseRunner):  # type: ignore[misc, name-defined]
        def __init__(self, name: str, infer: Infer, feed: Feed) -> None:
            super().__init__(name=name)
            self._infer, self._inputs = infer, feed

        def get_input_metadata_impl(self) -> Any:
            metadata = tensorrt_library.polygraphy(target, "common").TensorMetadata()
            for name, array in self._inputs.items():
                metadata.add(name, array.dtype, array.shape)
            return metadata

        def infer_impl(self, feed_dict: Feed) -> Feed:
            started = time.perf_counter()
            outputs = self._infer(feed_dict)
            self.inference_time = time.perf_counter() - started  # polygraphy reads it
            return outputs

    return comparator, Runner
