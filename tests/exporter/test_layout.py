"""Where a bundle's weights are stored, and how many of their bytes a step reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.engines.ort import OrtEngine, use_threads
from skipdecode.exporter.layout import move_to_file, remove_lowered, save_engine, save_tied, weight_bytes
from skipdecode.graph_passes.write_out_experts import READ_FRACTION
from tests.graph_passes.running import Array, with_parameters

HEADER = '<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]> g'
PRODUCT = f"""{HEADER} (float[B,16] x, float[16,64] weight, float[64] bias) => (float[B,64] y) {{
    p = MatMul (x, weight) y = Add (p, bias)
}}"""
TURNED = f"""{HEADER} (float[B,16] x, float[64,16] weight, float[64] bias, float[64] own) => (float[B,64] y) {{
    turned = Transpose (weight) p = MatMul (x, turned) scaled = Mul (p, own) y = Add (scaled, bias)
}}"""
X = np.ones((2, 16), np.float32)


def _drawn(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).random(shape, np.float32)


def _answer(engine: Path) -> Array:
    use_threads(None)
    (y,) = OrtEngine(engine).session.run(["y"], {"x": X})
    return np.asarray(y)


def _product() -> tuple[ir.Model, Array, Array]:
    weight, bias = _drawn(16, 64), _drawn(64)
    return with_parameters(PRODUCT, {"weight": weight, "bias": bias}), weight, bias


def test_large_weights_are_stored_next_to_the_engine_and_small_ones_inside_it(tmp_path: Path) -> None:
    model, weight, bias = _product()
    save_engine(model, tmp_path / "head.onnx")
    assert (tmp_path / "head.bin").stat().st_size == weight.nbytes
    np.testing.assert_allclose(_answer(tmp_path / "head.onnx"), X @ weight + bias, rtol=1e-6)


def test_a_weight_of_the_same_name_in_another_engine_is_written_once_whatever_its_shape(tmp_path: Path) -> None:
    head, weight, bias = _product()
    save_engine(head, tmp_path / "head.onnx")
    own = _drawn(64, 16)[:, 0]
    embed = with_parameters(TURNED, {"weight": weight.reshape(64, 16), "bias": bias, "own": own})
    save_engine(embed, tmp_path / "embed.onnx", shared_with=tmp_path / "head.onnx")
    assert not (tmp_path / "embed.bin").exists(), "it has no large weight of its own"
    expected = (X @ weight.reshape(64, 16).T) * own + bias
    np.testing.assert_allclose(_answer(tmp_path / "embed.onnx"), expected, rtol=1e-5)


def test_only_weights_in_a_file_of_another_folder_are_copied(tmp_path: Path) -> None:
    model, weight, _ = _product()
    (tmp_path / "graphs").mkdir()
    save_engine(model, tmp_path / "graphs" / "head.onnx")
    value = model.graph.initializers["layer.weight"]
    stored = value.const_value
    move_to_file([value], tmp_path / "graphs" / "again.bin")
    assert value.const_value is stored and not (tmp_path / "graphs" / "again.bin").exists()
    move_to_file([value], tmp_path / "moved.bin")
    moved = value.const_value
    assert isinstance(moved, ir.ExternalTensor) and (moved.location, Path(moved.base_dir)) == ("moved.bin", tmp_path)
    np.testing.assert_array_equal(moved.numpy(), weight)


def test_a_tied_weight_is_padded_with_rows_of_zeros(tmp_path: Path) -> None:
    table = _drawn(13, 64)
    text = f"{HEADER} (float[B,64] x, float[13,64] table) => (float[B,13] y) {{ t = Transpose (table) y = MatMul (x, t) }}"
    head = with_parameters(text, {"table": table})
    move_to_file(head.graph.initializers.values(), tmp_path / "weights.bin")
    (tmp_path / "targets").mkdir()
    assert save_tied("layer.table", head, tmp_path, "targets") == ("targets/tied.bin", 16 * 64 * 4)
    stored = np.fromfile(tmp_path / "targets" / "tied.bin", np.float32).reshape(16, 64)
    np.testing.assert_array_equal(stored, np.concatenate([table, np.zeros((3, 64), np.float32)]))
    assert save_tied(None, head, tmp_path, "targets") == (None, 0)


def test_a_step_reads_every_weight_once() -> None:
    model, weight, bias = _product()
    assert weight_bytes(model.graph) == weight.nbytes + bias.nbytes
    model.graph.initializers["layer.weight"].meta[READ_FRACTION] = 1 / 4  # as of a mixture that is written out
    assert weight_bytes(model.graph) == weight.nbytes // 4 + bias.nbytes


def test_a_step_of_a_mixture_reads_the_chosen_experts() -> None:
    arrays = {"up": _drawn(8, 32, 16), "down": _drawn(8, 16, 32)}
    text = f"""{HEADER} (float[B,16] x, float[B,8] routed, float[8,32,16] up, float[8,16,32] down) => (float[B,16] y)
    {{ y = com.microsoft.MoE <k: int = 3> (x, routed, up, , down) }}"""
    assert weight_bytes(with_parameters(text, arrays).graph) == 2 * 3 * 16 * 32 * 4


def test_the_row_that_a_step_reads_of_rotary_tables_is_not_counted() -> None:
    text = f"""{HEADER}
    (float[B,1,64] q, float[B,2,C,32] k, float[B,2,C,32] v, int32[B] n, int32 t, float[48,16] cos, float[48,16] sin)
    => (float[B,1,64] y)
    {{ y = com.microsoft.GroupQueryAttention <num_heads: int = 2, kv_num_heads: int = 2> (q, , , k, v, n, t, cos, sin) }}"""
    assert weight_bytes(with_parameters(text, {"cos": _drawn(48, 16), "sin": _drawn(48, 16)}).graph) == 0


@pytest.mark.parametrize("weights", [(), ("lowered.bin",)], ids=["without", "with"])
def test_a_lowered_graph_is_removed_with_its_weights(weights: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("lowered.onnx", "weights.safetensors", *weights):
        (tmp_path / name).touch()
    remove_lowered(tmp_path / "lowered.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]
