"""Keep TensorRT's KV update in place where a model's attention has a scale of 1 (OPT: it scales the query itself).

    Attention(query, key, value, mask, scale=1) -> Attention(query * 4, key, value, mask, scale=1/4)

Why: TensorRT's parser multiplies query and key by the square root of the scale. Where that is 1, the builder removes the product
on the key, but copies the *whole* key buffer in each step (TensorRT-RTX 1.7.1, seen in the built engine's layers). Any other
scale moves into the attention kernel. 4 and its root are exact in every float type.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_FACTOR = 4.0


class AvoidUnitScalePass(ir.passes.InPlacePass):
    """Multiplies the query of attention with a scale of 1 by 4. Leaves attention with any other scale as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "Attention" and node.attributes["scale"].as_float() == 1.0]
        for node in found:
            query = node.inputs[0]
            assert query is not None and query.dtype is not None
            factor = ir.node("Constant", [], {"value": ir.tensor(np.array(_FACTOR, dtype=query.dtype.numpy()))})
            scaled = ir.node("Mul", [query, factor.outputs[0]])
            scaled.outputs[0].shape, scaled.outputs[0].type = query.shape, query.type
            model.graph.insert_before(node, [factor, scaled])
            node.replace_input_with(0, scaled.outputs[0])
            node.attributes["scale"] = ir.AttrFloat32("scale", 1 / _FACTOR)
        return ir.passes.PassResult(model, bool(found))
