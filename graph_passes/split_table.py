"""Split a table with more numbers than a tensor may have into parts of whole rows.

    Gather(table [V,W], ids) -> Where(ids < R, Gather(table[:R], min(ids, R - 1)), Gather(table[R:], max(ids - R, 0)))

Why: TensorRT's kernels index a tensor's numbers with 32 bits (its issue 1948), yet its builder accepts larger constants without a
warning. Gemma 4's per-layer inputs have 2.3e9 numbers (E2B). The parts refer to the same bytes of the weights file as the table.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from skipdecode.graph_passes.conventions import add_constant, int64_constant, required_input


class SplitTablePass(ir.passes.InPlacePass):
    """Splits each table with more than `max_elements` numbers.

    Declines tables of at most `max_elements` numbers, and initializers that are not looked up by rows.

    Args:
        max_elements: the most numbers that a part may have.
    """

    def __init__(self, *, max_elements: int) -> None:
        super().__init__()
        self.max_elements = max_elements

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        large = [
            value for value in model.graph.initializers.values() if _num_elements(value) > self.max_elements and _is_table(value)
        ]
        for table in large:
            self._split(model.graph, table)
        return ir.passes.PassResult(model, bool(large))

    def _split(self, graph: ir.Graph, table: ir.Value) -> None:
        tensor = table.const_value
        assert tensor is not None
        count, width = tensor.shape.numpy()
        parts = -(-count * width // self.max_elements)
        rows = min(-(-count // parts), self.max_elements // width)
        parts_by_first_row = {first: _part(graph, tensor, first, min(rows, count - first)) for first in range(0, count, rows)}
        for node in list(table.consumers()):
            tape = Tape()
            chosen = _look_up(tape, required_input(node, 1), parts_by_first_row, rows)
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [chosen])
        del graph.initializers[str(table.name)]


def _num_elements(value: ir.Value) -> int:
    return value.const_value.size if value.const_value is not None else 0


def _is_table(value: ir.Value) -> bool:
    by_rows = (node.op_type == "Gather" and not (index or node.attributes.get_int("axis", 0)) for node, index in value.uses())
    return value.shape is not None and len(value.shape) == 2 and all(by_rows)


def _part(graph: ir.Graph, table: ir.TensorProtocol, first: int, count: int) -> ir.Value:
    """Add an initializer with `count` rows of the table, from row `first` on."""
    shape, name = ir.Shape([count, table.shape.numpy()[1]]), f"{table.name}.{first}"
    if isinstance(table, ir.ExternalTensor):
        row = table.nbytes // table.shape.numpy()[0]
        part: ir.TensorProtocol = ir.ExternalTensor(
            table.location, (table.offset or 0) + first * row, count * row, table.dtype,
            shape=shape, name=name, base_dir=table.base_dir,
        )  # fmt: skip
    else:
        part = ir.tensor(table.numpy()[first : first + count], dtype=table.dtype, name=name)
    return add_constant(graph, part)


def _look_up(tape: Tape, ids: ir.Value, parts: dict[int, ir.Value], rows: int) -> ir.Value:
    """Look up rows `ids` [...]: [..., W]. `parts` maps first row to part; each has `rows` rows, the last one perhaps fewer."""

    def number(value: int) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(value, dtype=np.int64))})

    found = tape.op("Gather", [parts[0], tape.op("Min", [ids, number(rows - 1)])])
    for first in [*parts][1:]:
        inside = tape.op("Max", [tape.op("Sub", [ids, number(first)]), number(0)])
        own = tape.op("Gather", [parts[first], tape.op("Min", [inside, number(rows - 1)])])
        below = tape.op("Unsqueeze", [tape.op("Less", [ids, number(first)]), int64_constant(tape, -1)])
        found = tape.op("Where", [below, found, own])
    return found
