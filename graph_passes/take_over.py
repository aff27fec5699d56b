"""Replace one value by another."""

from __future__ import annotations

import onnx_ir as ir


def can_take_over(old: ir.Value, new: ir.Value) -> bool:
    """Whether `new` may replace `old`. Not if `old` is a graph output and `new` a graph input or output, with a name to keep."""
    return not (old.is_graph_output() and (new.is_graph_input() or new.is_graph_output()))


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` everywhere, also as a graph output; `new` gets its shape, type and, if free to change, its name."""
    assert can_take_over(old, new), f"{new.name} cannot be {old.name} too"
    new.shape, new.type = old.shape, old.type
    if not (new.is_graph_input() or new.is_graph_output()):
        name, old.name = old.name, f"{old.name}.before"
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Whether both values have the same dimensions, all of them known."""
    known = one.shape is not None and all(isinstance(size, int) or size.value is not None for size in one.shape)
    return known and one.shape == other.shape
