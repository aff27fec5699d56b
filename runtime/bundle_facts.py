"""What is inside a bundle, as plain JSON values: what skip-inspect shows and skip-validate reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from skipdecode import manifest as manifests
from skipdecode.kv_buffer import fixed_slots, plan_slots, slots_per_layer, state_bytes
from skipdecode.manifest import Manifest, Target, Variant
from skipdecode.schedule import Schedule, full_depth


def facts(manifest: Manifest) -> dict[str, Any]:
    """Model, limits, schedule, variants, segments, targets, memory: what `skip-inspect --json` prints, with units in the keys."""
    model, schedule = manifest.model, manifest.schedule
    sizes = {file.path: file.size for file in manifest.files}
    default = next((target for target in manifest.targets if target.name == manifest.default_target), None)
    return {
        "format_version": manifest.format_version,
        "model": {"name": model.name, "type": model.model_type, "layers": model.num_layers, "hidden_size": model.hidden_size,
                  "heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_size": model.head_size,
                  "vocabulary": model.vocab_size, "parameters": model.num_parameters,
                  "state_layers": [dataclasses.asdict(group) for group in model.state_layers]},
        "dtype": manifest.dtype,
        "limits": {"length_tokens": manifest.limits.max_length, "batch_rows": manifest.limits.max_batch},
        "schedule": {"name": schedule.name, "anchor": schedule.anchor.value, "warmup_layers": schedule.warmup_layers,
                     "layers": list(schedule.layers), "mean_layers": schedule.mean_layers,
                     "speedup": schedule.num_layers / schedule.mean_layers},
        "variants": [
            {"name": v.name, "layers": v.num_layers, "segments": list(v.segments), "positions": _positions(schedule, v)}
            for v in manifest.variants
        ],
        "segments": [{"layers": list(layers)} for layers in manifest.segments],
        "weights_bytes": manifests.ITEM_BYTES[manifest.dtype] * model.num_parameters,
        "kv_prompt_tokens": manifest.limits.max_length // 2,
        "kv_bytes_per_row": kv_bytes(manifest, schedule, default),
        "kv_bytes_per_row_without_skipping": kv_bytes(manifest, full_depth(model.num_layers), default),
        "targets": [_target_facts(target, manifest, sizes) for target in manifest.targets],
        "bundle_bytes": sum(sizes.values()),
    }  # fmt: skip


def _target_facts(target: Target, manifest: Manifest, sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "name": target.name, "weights": target.weights, "library": target.library,
        "library_version": target.library_version, "machine": target.machine,
        "cpu_features": list(target.cpu_features),
        "embed_bytes": engine_bytes(target.embed, sizes),
        "segment_bytes": [engine_bytes(path, sizes) for path in target.segments],
        "head_bytes": engine_bytes(target.head, sizes),
        "segment_weight_bytes": list(target.segment_weight_bytes),
        "head_weight_bytes": target.head_weight_bytes,
        "fixed_kv_buffer": target.fixed_kv_buffer,
        "kv_bytes_per_row": kv_bytes(manifest, manifest.schedule, target),
        "kv_bytes_per_row_without_skipping": kv_bytes(manifest, full_depth(manifest.model.num_layers), target),
    }  # fmt: skip


def engine_bytes(engine: str, sizes: dict[str, int]) -> int:
    """Bytes of an engine's file and of the file next to it that holds its weights, if any."""
    return sizes[engine] + sizes.get(engine.removesuffix(".onnx") + ".bin", 0)


def kv_bytes(manifest: Manifest, schedule: Schedule, target: Target | None) -> int:
    """Bytes of one row's KV buffer in the longest run, half of which is the prompt.

    Buffers of a fixed size (TensorRT's) have the longest run's slots, whatever the prompt. `target` None: as on cpu.
    """
    longest = manifest.limits.max_length
    slots = slots_per_layer(schedule, longest // 2, longest - longest // 2)
    if target is not None and target.fixed_kv_buffer:
        slots = fixed_slots(slots, plan_slots(manifest, target))
    float_bytes = target.float_bytes if target else 4
    return sum(state_bytes(manifest.model.layer_group(layer), count, float_bytes) for layer, count in enumerate(slots) if count)


def _positions(schedule: Schedule, variant: Variant) -> list[int | None] | None:
    """The [first, last] position of the schedule that uses `variant`; last None: to the end of the row. None: no position does,
    only the baseline and, with anchor `generated`, the prefill.
    """
    count = variant.num_layers
    used = [t for t, layers in enumerate(schedule.layers) if layers == count]
    if not used:
        return None
    return [used[0], None if schedule.layers[-1] == count else used[-1]]
