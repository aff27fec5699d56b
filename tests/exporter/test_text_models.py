"""Language models that transformers has only inside models that also see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from skipdecode.exporter import reference_run
from skipdecode.exporter.checkpoint_folder import Checkpoint
from skipdecode.exporter.model_names import load_config
from skipdecode.exporter.reference import skip_schedule
from skipdecode.exporter.rotary import rotary_base
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from tests.models import LAYERS, RELATIVES


def _muse_glimmer() -> Any:
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 2}
    text = {name: value for name, value in RELATIVES["muse_glimmer_text"]().to_dict().items() if name != "model_type"}
    sizes = {"out_hidden_size": 64, "projector_hidden_size": 32, "image_token_id": 95, "video_token_id": 96}
    config = transformers.MuseGlimmerConfig(text_config=text, vision_config={**eye, "pos_emb_width": 2}, **sizes)
    torch.manual_seed(0)
    model = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def test_muse_glimmers_text_model_has_the_whole_models_head_and_gives_its_logits(tmp_path: Path) -> None:
    model, ids = _muse_glimmer(), torch.tensor([[5, 6, 7, 8, 3, 9, 11, 12], [9, 8, 7, 6, 5, 4, 3, 2]])
    model.save_pretrained(tmp_path)
    assert load_config(str(tmp_path))[0].model_type == "muse_glimmer_text"
    alone = reference_run._load(Checkpoint(tmp_path), torch.float32)
    torch.testing.assert_close(alone(ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    schedule = build_schedule(ScheduleRequest(name="linear", max_layers=5, min_layers=2, span=3), LAYERS)
    skipped = []
    for each in (alone, model):
        with skip_schedule(each, schedule, prompt_length=[3, 5]):
            skipped.append(each(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits)
    torch.testing.assert_close(*skipped, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(skipped[0], alone(ids).logits, atol=1e-3)


def test_muse_glimmers_layers_rotate_by_the_models_base_or_not_at_all() -> None:
    """Whatever base a layer has, transformers' model takes its own."""
    config = RELATIVES["muse_glimmer_text"](layer_rope_theta=[100.0, 0, 10000.0, 0, 7.0, 0])
    assert [rotary_base(config, layer) for layer in range(LAYERS)] == [None, 0] * 3
