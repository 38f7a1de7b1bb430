"""Capture of target features for the drafter on text-only Qwen3.5, whose SGLang class lacks the setter."""

from __future__ import annotations


def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
    """Feature i is the input of layer i + 1, that is the output of layer i, as in SGLang's multimodal class."""
    self.capture_aux_hidden_states = True
    self.model.set_dflash_layers_to_capture([i + 1 for i in layer_ids])


def install_text_only_capture() -> None:
    from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM

    if not hasattr(Qwen3_5ForCausalLM, "set_dflash_layers_to_capture"):
        Qwen3_5ForCausalLM.set_dflash_layers_to_capture = set_dflash_layers_to_capture
