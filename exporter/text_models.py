"""Language models that transformers has only inside models that also see: its text model, with the head of the whole."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, Mistral4Config, Mistral4ForCausalLM, MuseGlimmerTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Muse Glimmer's text model and head."""

    config: MuseGlimmerTextConfig
    config_class = MuseGlimmerTextConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor | None = None, **arguments: Any) -> CausalLMOutputWithPast:
        """Logits [B,S,V], scaled and capped as the whole model does."""
        out = self.model(input_ids, **arguments)
        cap = self.config.final_logit_softcapping
        logits = torch.tanh(self.lm_head(out.last_hidden_state) * self.config.output_multiplier / cap) * cap
        return CausalLMOutputWithPast(logits=logits, cache=out.cache)


def register() -> None:
    """Register with AutoModelForCausalLM what transformers 5.24 does not: the class above, and Mistral 4's."""
    AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
