"""Compute fp16 and bf16 graphs in fp32, because ONNX Runtime's CPU provider has no kernel for matrices of narrow floats.

    MatMul(x fp16, W fp16)  ->  MatMul(x fp32, W fp32)

Weights are cast one at a time, when they are written. Casts between narrow and fp32 are removed.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from skipdecode.graph_passes.clean_trace import clean_trace
from skipdecode.graph_passes.conventions import NARROW
from skipdecode.graph_passes.mapped import release_pages


class WidenGraphPass(ir.passes.InPlacePass):
    """Turns a narrow graph into fp32. Declines graphs without narrow values.

    Weights convert exactly; products and sums are rounded less.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        values = [*model.graph.inputs, *model.graph.initializers.values(), *(out for node in model.graph for out in node.outputs)]
        narrow = [value for value in values if value.dtype in NARROW]
        for value in narrow:
            value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object: a clone's values share theirs with the original's
            if value.const_value is not None:
                value.const_value = _wide(value.const_value)
        for node in model.graph:
            if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) in NARROW:
                node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
            filling = node.attributes.get_tensor("value") if node.op_type == "ConstantOfShape" else None
            if filling is not None and filling.dtype in NARROW:
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(filling.numpy().astype(np.float32)))
        if narrow:
            clean_trace(model)  # norms and rotary embeddings fuse once the casts are gone
        return ir.passes.PassResult(model, bool(narrow))

    def ensures(self, model: ir.Model) -> None:
        left = [value.name for node in model.graph for value in node.outputs if value.dtype in NARROW]
        if left:
            raise ir.passes.PostconditionError(f"values that are narrow still: {left}")


def _wide(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    def cast() -> ir.TensorProtocol:
        wide = tensor.numpy().astype(np.float32)
        release_pages(tensor)
        return ir.tensor(wide, name=tensor.name)

    return ir.LazyTensor(cast, dtype=ir.DataType.FLOAT, shape=tensor.shape, name=tensor.name)  # type: ignore[arg-type]
