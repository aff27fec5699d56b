"""The graphs that a bundle's plans were built from, written next to its standard ones."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir

from skipdecode import manifest as manifests
from skipdecode.exporter.graphs import StandardGraphs
from skipdecode.exporter.request import QUANTIZED_BITS
from skipdecode.exporter.tensorrt_target import lower
from skipdecode.graph_passes.conventions import NORMS, scales_last_axis_only
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.stitch import stitch
from skipdecode.kv_buffer import plan_slots
from skipdecode.prefill import PREFILL_CHUNK


def lower_and_write(bundle: Path, made: manifests.Manifest, target: manifests.Target, listed: Path) -> None:
    """Write the lowered graphs of a target's plans, and to `listed` each plan's path -> its graph, most tokens in a pass."""
    slots = plan_slots(made, target)
    outer = [ir.load(bundle / "graphs" / f"{part}.onnx") for part in ("embed", "head")]
    bits = QUANTIZED_BITS.get(target.weights)
    quantization = Quantization(bits=bits) if bits else None
    tied = None if quantization else StandardGraphs(embed=outer[0], layers=(), head=outer[1]).tied
    known: dict[str, tuple[str, int]] = {}
    for path in (target.embed, *target.segments, target.head):
        part = Path(path).stem
        layers = made.segments[int(part.removeprefix("segment_"))] if part.startswith("segment") else ()
        graphs = [ir.load(bundle / "graphs" / f"layer_{layer:03d}.onnx") for layer in layers]
        source = stitch(graphs, name=part) if graphs else ir.load(bundle / "graphs" / f"{part}.onnx")
        most = slots[layers[0]] if layers else PREFILL_CHUNK
        plan = lower(source, most, tied, quantization)
        norms = [node for node in plan.graph if node.op_type in NORMS]
        assert all(scales_last_axis_only(node) for node in norms), "a norm has a scale per group or head"
        known[path] = f"graphs/lowered_{target.name}_{part}.onnx", most
        ir.save(plan, bundle / known[path][0])
    listed.write_text(json.dumps(known))
