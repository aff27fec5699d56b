"""Checks that parity tests share: fed torch's tokens, a decoder gives torch's logits, whatever its buffers held before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from skipdecode.decoder import Decoder
from skipdecode.exporter.reference import greedy_tokens
from skipdecode.generate import Generator
from skipdecode.graph_passes.quantization import Quantization
from skipdecode.graph_passes.quantize_plan_weights import quantise_by_output
from skipdecode.memory import DeviceMemory


def assert_gives_the_references_logits(
    decoder: Decoder, model: Any, prompts: Sequence[list[int]], new: int, tolerance: float
) -> None:
    """Check the decoder's logits step by step and row by row, fed the reference's tokens.

    So one early difference does not change all later inputs.

    Args:
        model: the torch model; for narrow engines, with its weights rounded to their dtype.
        prompts: longest first, of the lengths that the decoder was made for.
        tolerance: as a share of each row's largest logit.
    """
    for where, error in _errors(decoder, model, prompts, new):
        assert error <= tolerance, f"row and step {where}: {error:.4f}"


def assert_mostly_gives_the_references_logits(
    decoder: Decoder, model: Any, prompts: Sequence[list[int]], new: int, tolerance: float
) -> None:
    """As above, for half of all rows and steps: a mixture with random weights may choose another expert over one rounded bit.

    So does torch itself: the tests' Mixtral differs by up to 0.1 in fp16 and 0.2 in bf16, in the median by 0.002 and 0.02.
    """
    errors = [error for _, error in _errors(decoder, model, prompts, new)]
    assert np.median(errors) <= tolerance, np.round(errors, 4)


def _errors(decoder: Decoder, model: Any, prompts: Sequence[list[int]], new: int) -> Iterator[tuple[tuple[int, int], float]]:
    return errors_of(decoder, prompts, [greedy_tokens(model, decoder.schedule, prompt, new) for prompt in prompts])


def errors_of(
    decoder: Decoder, prompts: Sequence[list[int]], expected: Sequence[tuple[Sequence[int], Any]]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield row and step, and the largest difference of their logits as a share of the row's largest logit.

    Args:
        expected: for each row its tokens, which the decoder is fed, and torch's logits [steps,V].
    """
    decoder.prefill(prompts)
    for step in range(len(expected[0][1])):
        if step:
            decoder.decode_step(np.array([tokens[step - 1] for tokens, _ in expected]))
        for row, (_, logits) in enumerate(expected):
            wanted = logits[step].numpy()
            yield (row, step), np.abs(decoder.logits[row] - wanted).max() / np.abs(wanted).max()


def on_levels(model: Any, quantize: str) -> Any:
    """A copy of torch's model in fp16 numbers, its matrices (not embedding and routers) rounded as TensorRT's quantised ones."""
    model = copy.deepcopy(model).half().float()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _rounded(module.weight.detach(), quantize, ir.DataType.FLOAT16)
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            parameter.data = torch.stack([_rounded(matrix, quantize, ir.DataType.FLOAT) for matrix in parameter.detach()])
    return model


def _rounded(weight: Any, quantize: str, of_scales: ir.DataType) -> Any:
    """A matrix [N,K] as its quantised levels and scales reproduce it."""
    if quantize == "int4":
        parts = Quantization(bits=4).quantise(weight.numpy())
        levels = np.stack([parts["weight"] & 15, parts["weight"] >> 4], axis=-1).reshape(-1, 32).astype(np.float32) - 8
        scales = parts["scales"].reshape(-1, 1)
    else:
        levels, scales = quantise_by_output(weight.numpy(), of_scales)
        scales = scales[:, None]
    rounded = (levels * scales.astype(of_scales.numpy())).astype(np.float16).astype(np.float32)
    return torch.from_numpy(rounded.reshape(weight.shape))


def assert_every_route_is_a_graph(generator: Generator, graphs: bool = True) -> None:
    """Every route of the loop that the generator kept is a CUDA graph; with `graphs=False`, none is."""
    loop = generator._kept_loop
    assert loop is not None and loop.graphs == (len(loop.decoder._routes) if graphs else 0)


def spoil(generator: Generator) -> None:
    """Fill every slot of the KV buffer that the generator kept from its last run on a device with NaN."""
    loop = generator._kept_loop
    assert loop is not None and isinstance(loop.decoder.memory, DeviceMemory)
    for layer in loop.decoder.kv.layers:
        for array in layer.values():
            loop.decoder.memory.device.send(array.pointer, np.full(array.nbytes // 2, 0x7FFF, dtype=np.uint16))
