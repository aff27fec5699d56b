"""A mixture's tensors as files store them, and as the model has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.checkpoint import CheckpointSource
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.exporter.weights import TensorSource
from tests.models import RELATIVES
from tests.zoo import Zoo

UP = "model.layers.3.block_sparse_moe.experts.1.w3.weight"


def _source(folder: Path) -> TensorSource:
    return CheckpointSource(folder, build_skeleton(transformers.AutoConfig.from_pretrained(folder)))


CONVERTED = ["mixtral", "qwen3_moe", "phimoe", "granitemoe", "ernie4_5_moe", "minimax_m2", "deepseek_v3", "kimi_linear"]
DIVIDED = ["exaone", "lara_mini", "sarvam_moe", "aria_text"]  # files of lara_mini and sarvam_moe have several matrices in one


@pytest.mark.parametrize("name", [*CONVERTED, *DIVIDED])
def test_every_parameter_is_read_as_transformers_loads_it(name: str, zoo: Zoo) -> None:
    stored = load_file(zoo.checkpoint(name) / "model.safetensors").keys()
    expected = zoo.model(name).state_dict()
    assert not stored >= expected.keys()  # else there is nothing to convert
    skeleton = build_skeleton(transformers.AutoConfig.from_pretrained(zoo.checkpoint(name)))
    source = CheckpointSource(zoo.checkpoint(name), skeleton)
    for parameter, shape in skeleton.shapes.items():
        assert torch.equal(source(parameter, shape), expected[parameter]), parameter


def test_the_eleventh_expert_comes_after_the_tenth(tmp_path: Path) -> None:
    config = RELATIVES["mixtral"]()
    config.num_hidden_layers, config.num_local_experts = 1, 12
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    value = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(_source(tmp_path)("model.layers.0.mlp.experts.down_proj", tuple(value.shape)), value)


def test_llama_4s_experts_may_be_stored_one_by_one_as_llm_compressor_writes_them(zoo: Zoo, tmp_path: Path) -> None:
    state = load_file(zoo.checkpoint("llama4_text") / "model.safetensors")
    transformers.AutoConfig.from_pretrained(zoo.checkpoint("llama4_text")).save_pretrained(tmp_path)
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.T.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(expert)
                apart |= {f"{stem}.gate_proj.weight": gate.contiguous(), f"{stem}.up_proj.weight": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            apart |= {f"{stem}{expert}.down_proj.weight": matrix.T.contiguous() for expert, matrix in enumerate(tensor)}
        else:
            apart[name] = tensor
    save_file({f"language_model.{name}": tensor for name, tensor in apart.items()}, tmp_path / "model.safetensors")
    source, skeleton = _source(tmp_path), build_skeleton(transformers.AutoConfig.from_pretrained(tmp_path))
    for parameter, shape in skeleton.shapes.items():
        assert torch.equal(source(parameter, shape), state[parameter]), parameter


def test_mismatched_experts_give_a_one_line_error(zoo: Zoo, tmp_path: Path) -> None:
    state = load_file(zoo.checkpoint("mixtral") / "model.safetensors")
    transformers.AutoConfig.from_pretrained(zoo.checkpoint("mixtral")).save_pretrained(tmp_path)
    for change, says in (({UP: torch.zeros(7, 64)}, "cannot be put together"), ({UP: None}, "has shape|cannot be put together")):
        changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelNotSupportedError, match=says) as caught:
            _source(tmp_path)("model.layers.3.mlp.experts.gate_up_proj", (5, 256, 64))
        assert "\n" not in str(caught.value)
