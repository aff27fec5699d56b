"""Drop graph inputs that nothing reads: an embedding without learnt positions has no use for `position_ids`.

    graph(input_ids, position_ids), position_ids unused      ->      graph(input_ids)

Why: TensorRT warns about unused inputs, and `compile_tensorrt` takes such a warning for an input that the parser ignored. The
runtime binds only the inputs that an engine has.
"""

from __future__ import annotations

import onnx_ir as ir


class DropUnusedInputsPass(ir.passes.InPlacePass):
    """Removes the inputs that nothing reads. Keeps inputs that are also outputs of the graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        unused = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
        for value in unused:
            model.graph.inputs.remove(value)
        return ir.passes.PassResult(model, bool(unused))
