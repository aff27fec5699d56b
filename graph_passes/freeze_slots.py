"""Give every KV buffer its number of slots.

    past_key.3 [B,KVH,C,D] -> past_key.3 [B,KVH,2048,D], and likewise wherever C appears

Why: TensorRT updates a KV buffer in place only where its length is static.
"""

from __future__ import annotations

import onnx_ir as ir

_SLOTS_DIM = "C"  # the tracer's name for the dimension, see bindings


class FreezeSlotsPass(ir.passes.InPlacePass):
    """Replaces C by the number of slots in every shape. Leaves shapes without C as they are.

    Args:
        slots: of each layer's KV buffer in this graph.
    """

    def __init__(self, *, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = False
        for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
            if value.shape is not None and any(_is_slots(size) for size in value.shape):
                value.shape = ir.Shape([self.slots if _is_slots(size) else size for size in value.shape])
                changed = True
        return ir.passes.PassResult(model, changed)


def _is_slots(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value == _SLOTS_DIM
