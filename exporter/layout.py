"""How engines and their weights lie in a bundle: helpers shared by all targets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from skipdecode import bindings
from skipdecode.graph_passes.mapped import release_pages
from skipdecode.graph_passes.run_passes import run_passes
from skipdecode.graph_passes.write_out_experts import READ_FRACTION

_TIED = "tied.bin"  # in a target's folder: the weight that embedding and head share
_MIN_EXTERNAL_BYTES = 1024  # smaller tensors stay inside the graph

Report = Callable[[str, float], None]  # (what is being done, fraction done)
Write = Callable[[ir.Model, Path], None]  # writes a lowered graph's engine to a file


def weight_bytes(graph: ir.Graph) -> int:
    """Bytes of weights that a one-row step reads. Of a mixture only the chosen experts count; rotary tables do not."""
    return sum(map(_bytes_read, graph.initializers.values()))


def _bytes_read(weight: ir.Value) -> int:
    tensor = weight.const_value
    readers = [use.node for use in weight.uses()]
    if tensor is None or any(node.op_type == "GroupQueryAttention" for node in readers):
        return 0
    mixture = next((node for node in readers if node.op_type in ("MoE", "QMoE")), None)
    share = weight.meta.get(READ_FRACTION, 1) if mixture is None else mixture.attributes["k"].as_int() / tensor.shape.numpy()[0]
    return round(tensor.nbytes * share)


def lower_and_write(graph: ir.Model, passes: Iterable[ir.passes.PassBase], path: Path, write: Write) -> int:
    """Lower a copy of a standard graph and `write` its engine; returns the engine's `weight_bytes`.

    Raises:
        ModelNotSupportedError: as `run_passes`.
    """
    lowered = graph.clone()
    run_passes(lowered, passes)
    read_bytes = weight_bytes(lowered.graph)
    write(lowered, path)
    return read_bytes


def save_engine(lowered: ir.Model, path: Path, *, shared_with: Path | None = None) -> None:
    """Write a graph and, next to it, its weights as `<name>.bin`.

    Args:
        shared_with: an engine in the same folder. Weights that it stores under the same name (a parameter's, so the same bytes)
            are referred to and not written again: a tied embedding and head are one weight.
    """
    shared_weights = _load_initializers(shared_with) if shared_with is not None else {}
    unshared = []
    for name, value in lowered.graph.initializers.items():
        shared = shared_weights[name].const_value if name in shared_weights else None
        if isinstance(shared, ir.ExternalTensor) and value.shape is not None:
            value.const_value = ir.ExternalTensor(
                shared.location, shared.offset, shared.length, shared.dtype, shape=value.shape, name=name, base_dir=path.parent
            )
        else:
            unshared.append(value)
    move_to_file(unshared, path.with_suffix(".bin"))
    ir.save(lowered, path)


def _load_initializers(engine: Path) -> Mapping[str, ir.Value]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Ignoring unknown external data key")  # ONNX Runtime's: where prepacked data lies
        return ir.load(engine).graph.initializers


def save_tied(tied: str | None, head: ir.Model, partial: Path, folder: str) -> tuple[str | None, int]:
    """Write the weight that embedding and head share into a target's folder, row by row, as their input `tied_weight` expects it.

    Args:
        tied: the weight's name in `head`; None: they share nothing.

    Returns:
        The file's path in the bundle and its size in bytes; None and 0 if nothing is shared.
    """
    if tied is None:
        return None, 0
    path = partial / folder / _TIED
    weight = head.graph.initializers[tied].const_value
    assert isinstance(weight, ir.ExternalTensor)
    rows = weight.shape.numpy()[0]
    with path.open("wb") as file:
        weight.tofile(file)
        file.truncate(weight.nbytes // rows * bindings.tied_rows(rows))  # extends it with zero rows
    release_pages(weight)
    return f"{folder}/{_TIED}", path.stat().st_size


def move_to_file(values: Iterable[ir.Value], file: Path) -> None:
    """Move weights into `file`: those that passes made and are too large for a graph, and those that lie in another folder.

    Without any, no file is written.
    """
    moved = [value for value in values if _needs_file(value.const_value, file.parent)]
    if not moved:
        return
    tensors = [value.const_value for value in moved if value.const_value is not None]
    for value, tensor in zip(moved, convert_tensors_to_external(tensors, file.parent, file.name), strict=True):
        value.const_value = tensor
    release_pages(*tensors)


def _needs_file(tensor: ir.TensorProtocol | None, folder: Path) -> bool:
    if isinstance(tensor, ir.ExternalTensor):
        return Path(tensor.base_dir) != folder
    return tensor is not None and tensor.nbytes >= _MIN_EXTERNAL_BYTES


def remove_lowered(graph: Path) -> None:
    """Remove a graph that was written only to be compiled, and the file that `move_to_file` wrote for it."""
    for file in (graph, graph.with_suffix(".bin")):
        file.unlink(missing_ok=True)
