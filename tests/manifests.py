"""A manifest made by hand, of a bundle that no export wrote and nothing runs."""

from __future__ import annotations

from pathlib import Path

from skipdecode import manifest as manifests
from skipdecode.graph_passes.plan import plan_variants
from skipdecode.model import Model
from skipdecode.schedule import Schedule


def make_manifest(schedule: Schedule, folder: Path) -> manifests.Manifest:
    """A manifest for `schedule` whose engines are files of a few bytes."""
    plan = plan_variants(schedule)
    engines = ["embed.onnx", "head.onnx", *(f"segment_{i}.onnx" for i in range(len(plan.segments)))]
    folder.mkdir(exist_ok=True)
    for name in engines:
        (folder / name).write_bytes(name.encode())
    return manifests.Manifest(
        format_version=manifests.FORMAT_VERSION,
        model=Model(
            name="m", model_type="opt", num_layers=schedule.num_layers, hidden_size=8, num_heads=2, num_kv_heads=2, head_size=4,
            vocab_size=9, num_parameters=100, state_layers=(), eos_token_ids=(2,),
        ),
        dtype="float32",
        limits=manifests.Limits(max_length=32, max_batch=4),
        schedule=schedule,
        kv_slots=tuple(map(schedule.cap, range(schedule.num_layers))),
        segments=plan.segments,
        variants=tuple(manifests.Variant(name=f"v{n}", num_layers=n, segments=s, graph=None) for n, s in plan.variants),
        targets=(
            manifests.Target(
                name="cpu",
                weights="fp32", library="onnxruntime", library_version="1", machine="x86_64", cpu_features=("avx2",),
                embed="embed.onnx", segments=tuple(engines[2:]), head="head.onnx", tied_weight=None,
                segment_weight_bytes=(1 << 20,) * len(engines[2:]), head_weight_bytes=1 << 16,
            ),
        ),
        files=tuple(manifests.describe_file(folder, name) for name in engines),
    )  # fmt: skip
