"""Settings in config.json from which no model can be built: an error of one line each, and nothing is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode import manifest as manifests
from skipdecode.errors import ModelNotSupportedError
from skipdecode.exporter.config_json import reason
from skipdecode.exporter.export import ExportRequest, export
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.skeleton import build_skeleton
from skipdecode.schedule_builders import ScheduleRequest
from tests.models import CONFIGS, LAYERS, MAX_LENGTH, RELATIVES
from tests.unprivileged import UNPRIVILEGED
from tests.zoo import Zoo, edit_config

LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"rope_parameters": {"rope_type": "wibble"}}, "'wibble' is not found, in `rope_init_fn = .*rope_type"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "Missing required keys .*'factor'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "'Tensor' and 'str', in `inv_freq /= factor`"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "'str' and 'Tensor', in `inv_freq = 1.0 / .base"),
        ("llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": "x"}}, "embeddings is 'x' in its config"),
        ("llama", {"hidden_act": "wibble"}, "'wibble' is not found, in `self.act_fn = ACT2FN.config.hidden_act."),
        ("llama", {"intermediate_size": -8}, "negative dimension -8.*, in `self.gate_proj = "),
        ("llama", {"pad_token_id": 1000}, "Padding_idx must be within .*, in `self.embed_tokens = "),
        ("llama", {"vocab_size": 0}, "vocab_size is 0 in its config.json; write a whole number, 1 or more"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0 in its config.json"),
        ("llama", {"head_dim": -8}, "head_dim is -8 in its config.json"),
        ("llama", {"max_position_embeddings": -1}, "max_position_embeddings is -1 in its config.json"),
        ("llama", {"num_key_value_heads": 3}, "has 4 heads, not a multiple of its 3 key/value heads"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0 in its config.json; write a whole number, 1 or more"),
        ("gpt_neo", {"window_size": -1}, "window_size is -1 in its config.json"),
        ("gpt2", {"n_layer": 10**15}, "n_layer is 1000000000000000 in its config.json; write 4096 or less"),
        ("gpt2", {"n_head": 0}, "n_head is 0 in its config.json"),
        ("bloom", {"max_position_embeddings": "x"}, "max_position_embeddings is 'x' in its config.json"),
        ("axk1", {"qk_rope_head_dim": None}, "Field 'qk_rope_head_dim' expected int, got NoneType"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0 in its config.json"),
        ("granitemoe", {"num_local_experts": None}, "num_local_experts is None in its config.json; write a whole number, 1"),
        ("qwen3_moe", {"num_local_experts": "x"}, "num_local_experts is 'x' in its config.json; write a whole number, 1 or more"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 in its config.json; write 1 to 5"),
        ("deepseek_v3", {"num_experts_per_tok": None}, "num_experts_per_tok is None in its config.json; write 1 to 8"),
        ("aria_text", {"moe_topk": 6}, "moe_topk is 6 in its config.json; write 1 to 5"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 0, 3, 3, 3]}, "moe_topk is .3, 3, 0, 3, 3, 3. in its config.json; write 1 to 5"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3 in its config.json; write a divisor of 8"),
        ("deepseek_v3", {"n_group": 0}, "n_group is 0 in its config.json; write a divisor of 8"),
        ("deepseek_v3", {"topk_group": 0}, "topk_group is 0 in its config.json; write 1 to 4"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group is 9 in its config.json; write 1 to 4"),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5 in its config.json; write 1 to 4, the number of experts in",
        ),
        (
            "nemotron_h",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5 in its config.json; write 1 to 4, the number of experts in",
        ),
        ("qwen2", {"head_dim": None}, "NoneType.*, in `self.scaling = self.head_dim"),
        ("glm", {"head_dim": None}, "NoneType.*, in `self.scaling = self.head_dim"),
        ("nemotron", {"num_key_value_heads": None}, "NoneType.*, in `self.num_key_value_groups = "),
        # settings that no module reads when it is built
        ("starcoder2", {"residual_dropout": -0.5}, "between 0 and 1, but got -0.5, in `.* p=self.residual_dropout, "),
        ("deepseek_v2", {"topk_group": None}, "must be int, not NoneType, in `group_idx = torch.topk"),
        ("ernie4_5_moe", {"moe_norm_min": None}, "both min and max are none"),
        ("biogpt", {"hidden_dropout_prob": 2.5}, "between 0 and 1, but got 2.5, in `.* p=self.dropout, "),
        ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling is 0.0 in its config.json; write a number above 0"),
    ],
)
def test_a_setting_that_makes_no_model_gives_one_line_that_names_config_json(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (CONFIGS | RELATIVES)[name]().save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", **changes)
    with pytest.raises(ModelNotSupportedError, match=says) as caught:
        export(ExportRequest(model=str(tmp_path / "model"), out=tmp_path / "out", random_weights=True))
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'model'}: ")
    assert "config.json" in line
    assert "\n" not in line
    assert "network" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


_EXPORTS = """
import sys
from pathlib import Path
from skipdecode.exporter.command import main
folder, out, *names = sys.argv[1:]
for name in names:
    Path(folder, name).chmod(0)
    assert main([folder, "--out", out, "--quiet"]) == 2
    Path(folder, name).chmod(0o644)
"""


def test_settings_under_a_hub_checkpoints_own_names_are_read_without_warnings(tmp_path: Path) -> None:
    """Kimi Linear's: transformers has other names for half of them, and calls `rope_scaling` deprecated."""
    settings = {
        "model_type": "kimi_linear", "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "hidden_size": 64,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 24, "short_conv_kernel_size": 3,
        },
        "num_hidden_layers": 3, "num_attention_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_token": 2, "moe_renormalize": True, "num_expert_group": 1,
        "num_shared_experts": 1, "model_max_length": 64, "rope_scaling": None, "rope_theta": 10000.0, "head_dim": 72,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    skeleton = build_skeleton(load_config(str(tmp_path))[0])
    assert [group.layers for group in skeleton.state_layers] == [(0, 2)]
    assert [state.shape for state in skeleton.state_layers[0].states] == [(3 * 2 * 24, 2), (2, 24, 24)]
    assert (skeleton.keys.num_heads, skeleton.keys.head_size) == (4, 24)
    assert [name for name in skeleton.shapes if name.endswith("experts.down_proj")] == [
        f"model.layers.{layer}.mlp.experts.down_proj" for layer in (1, 2)
    ]


def test_a_file_without_read_permission_is_reported_as_such_and_not_as_damaged(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo.checkpoint("llama"), tmp_path / "model"))
    names = ["config.json", "generation_config.json", "model.safetensors"]
    command = [*UNPRIVILEGED, sys.executable, "-c", _EXPORTS, folder, tmp_path / "out", *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = [f"{folder / name}: cannot be read (Permission denied); check its permissions" for name in names]
    assert (ended.returncode, ended.stderr.splitlines()) == (0, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_whose_config_json_asks_for_tuples_is_exported_as_any_other(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo.checkpoint("llama"), tmp_path / "model"))
    edit_config(folder, return_dict=False)
    linear = ScheduleRequest(name="linear", max_layers=LAYERS, min_layers=2, span=10)
    made = export(ExportRequest(model=str(folder), out=tmp_path / "out", schedule=linear, max_batch=4, max_length=MAX_LENGTH))
    theirs = manifests.read(zoo.bundle("llama"))
    assert {*made.files} ^ {*theirs.files} == {
        file for each in (made, theirs) for file in each.files if file.path == "config.json"
    }


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("no entry for 'foo'"), "no entry for 'foo'"),
        (KeyError("rope"), "'rope' is not found"),
        (KeyError(7), "'7' is not found"),
        (KeyError("several words\nand lines"), "several words"),
        (ValueError("\n one\nline"), "one"),
        (ValueError(), "ValueError"),
    ],
    ids=repr,
)
def test_the_line_of_a_librarys_error_that_says_most_is_reported(error: Exception, line: str) -> None:
    assert reason(error) == line
