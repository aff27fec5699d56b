"""Drop graph inputs that nothing reads: an embedding without learnt positions has no use for `position_ids`.

The runtime binds what an engine has; TensorRT warns of an unused input, which is otherwise the sign of one that it ignored.
"""

from __future__ import annotations

import onnx_ir as ir


class DropUnusedInputsPass(ir.passes.InPlacePass):
    """Leaves inputs that are outputs too."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        unused = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
        for value in unused:
            model.graph.inputs.remove(value)
        return ir.passes.PassResult(model, bool(unused))
