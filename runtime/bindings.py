"""Every engine input and output by name, shape and dtype: the contract between exporter, passes and runtime.

Shape letters, used everywhere: B rows, S new tokens in this pass, L layers, H hidden size, NH query heads, KVH key/value heads,
D head size, C slots of a layer's KV buffer, V vocabulary.

embed    input_ids [B,S] int64, position_ids [B,S] int64  ->  hidden [B,S,H]
segment  hidden [B,S,H], position_ids [B,S] int64, past_key.{l} and past_value.{l} [B,KVH,C,D] of its layers
         ->  hidden_out [B,S,H], present_key.{l} and present_value.{l}, the same memory as the past ones
         layers that keep states, instead of keys and values or alongside them: for each state s of model.state_layers
         past_{s}.{l} [B,...] and present_{s}.{l}, again the same memory, fp32 on every target, zeros before a row's first token
         layers that read the keys and values of layer k in another segment: present_key.{k}, present_value.{k} as inputs
         ONNX Runtime's engines also: seqlens_k [B] int32, valid slots - 1; total_sequence_length [1] int32, always on the host,
         the valid slots of the longest row, or more
         in TensorRT plans C is static (kv_buffer.static_slots), floats are fp16 or bf16, and a pass over a prompt has B = 1
head     hidden [B,S,H], last [B] int64 (which position of each row)  ->  logits [B,V], fp32 on every target
         on a device, a tied embedding and head both take the input tied_weight [V',E] in fp16 or bf16: E is the embedding's
         width, V' = tied_rows(V), and the rows from V on are zero
"""

from __future__ import annotations

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
HIDDEN = "hidden"
HIDDEN_OUT = "hidden_out"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
LAST = "last"
LOGITS = "logits"
TIED_WEIGHT = "tied_weight"
PAST, PRESENT = "past_", "present_"  # prefixes of what a layer keeps, before and after a pass, in one memory
PAST_KEY, PAST_VALUE = "past_key", "past_value"


def tied_rows(vocab_size: int) -> int:
    """Rows of a tied weight, a multiple of 8: with an odd number TensorRT-RTX makes a padded copy in each step."""
    return -(-vocab_size // 8) * 8


def of_layer(name: str, layer: int) -> str:
    """The name of a layer's array: `past_key`, 3 -> `past_key.3`."""
    return f"{name}.{layer}"


def past(state: str) -> str:
    """The name of a state before a pass: `conv_state` -> `past_conv_state`."""
    return PAST + state


def present(name: str) -> str:
    """The name of the output for an input: `past_key.3` -> `present_key.3`."""
    return PRESENT + name.removeprefix(PAST)
