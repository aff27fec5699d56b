"""A table is split into parts, in memory and in a file, and every row is still found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from skipdecode.graph_passes.split_table import SplitTablePass
from tests.graph_passes.running import run_model, with_parameters

LOOKED_UP = """<ir_version: 10, opset_import: ["" : 24]>
embed (int64[B,S] ids, float[7,3] table) => (float[B,S,3] hidden)
{ hidden = Gather <axis = 0> (table, ids) }"""
TABLE = np.arange(21, dtype=np.float32).reshape(7, 3)
IDS = np.array([[0, 2, 3, 6], [5, 4, 1, 3]])


def _model(text: str = LOOKED_UP) -> ir.Model:
    return with_parameters(text, {"table": TABLE})


@pytest.mark.parametrize(("most", "rows"), [(20, [4, 3]), (12, [4, 3]), (11, [3, 3, 1]), (3, [1] * 7)])
def test_each_row_is_looked_up_in_its_part(most: int, rows: list[int]) -> None:
    model = _model()
    assert SplitTablePass(max_elements=most)(model).modified
    assert [value.const_value.shape.numpy()[0] for value in model.graph.initializers.values() if value.const_value] == rows
    np.testing.assert_array_equal(run_model(model, {"ids": IDS})[0], TABLE[IDS])
    assert not SplitTablePass(max_elements=most)(model).modified


def test_the_parts_of_a_table_in_a_file_stay_in_place(tmp_path: Path) -> None:
    model, path, before = _model(), tmp_path / "embed.bin", 64  # bytes of other weights
    path.write_bytes(bytes(before) + TABLE.tobytes())
    (table,) = model.graph.initializers.values()
    table.const_value = ir.ExternalTensor(
        path.name, before, TABLE.nbytes, ir.DataType.FLOAT, shape=ir.Shape(TABLE.shape), name=table.name, base_dir=tmp_path
    )
    assert SplitTablePass(max_elements=11)(model).modified
    parts = [value.const_value for value in model.graph.initializers.values()]
    assert all(isinstance(part, ir.ExternalTensor) and part.path == str(path) for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.numpy() for part in parts if part is not None]), TABLE)


def test_a_table_that_is_small_or_also_multiplied_stays_whole() -> None:
    multiplied = LOOKED_UP.replace(
        "hidden = Gather <axis = 0> (table, ids)", "one = Gather <axis = 0> (table, ids)  hidden = MatMul (one, table)"
    )
    assert not SplitTablePass(max_elements=21)(_model()).modified
    assert not SplitTablePass(max_elements=20)(_model(multiplied)).modified
