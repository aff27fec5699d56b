"""What passes do when one value takes another's place."""

from __future__ import annotations

import onnx_ir as ir


def can_take_over(old: ir.Value, new: ir.Value) -> bool:
    """False where `old` is an output of the graph and `new` has a name to keep: an input or output of the graph too."""
    return not (old.is_graph_output() and (new.is_graph_input() or new.is_graph_output()))


def take_over(old: ir.Value, new: ir.Value) -> None:
    """`new` replaces `old` everywhere, also as an output of the graph, with its shape and type, and under its name."""
    assert can_take_over(old, new), f"{new.name} cannot be {old.name} too"
    new.shape, new.type = old.shape, old.type
    if not (new.is_graph_input() or new.is_graph_output()):
        name, old.name = old.name, f"{old.name}.before"
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Whether both are known to have the same dimensions."""
    known = one.shape is not None and all(isinstance(size, int) or size.value is not None for size in one.shape)
    return known and one.shape == other.shape
