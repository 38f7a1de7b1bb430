"""Random pairs small enough for thousands of requests: a Qwen3.5 hybrid or a dense Qwen3, and a DFlash drafter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

HIDDEN, FFN, BLOCK, MASK, HEADS = 64, 128, 8, 1, 4
COMMON = dict(
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    eos_token_id=0,
    bos_token_id=0,
    tie_word_embeddings=False,
    initializer_range=0.2,
)


def hybrid_target(folder: Path, vocab_size: int, heads: int = HEADS) -> Qwen3_5ForCausalLM:
    """3 GDN layers with `heads` value heads, 1 attention layer with `heads` query heads and 2 KV heads.

    Saved in fp32 under folder and returned.
    """
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        num_attention_heads=heads,
        linear_conv_kernel_dim=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        **COMMON,
    )
    model = Qwen3_5ForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.5, 8).log())
            if name.endswith("dt_bias"):
                p.uniform_(-2, 1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text()) | {"full_attention_interval": 4}
    path.write_text(json.dumps(saved))
    return model.eval()


def dense_target(folder: Path, vocab_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, num_attention_heads=HEADS, **COMMON)).float()
    model.save_pretrained(folder)
    return model.eval()


def drafter(folder: Path, vocab_size: int, heads: int = HEADS) -> str:
    """Two random layers that read the target's layers 1 and 2; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        COMMON,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=vocab_size,
        num_hidden_layers=2,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention_bias=False,
        dtype="float32",
        block_size=BLOCK,
        num_target_layers=4,
        dflash_config={"target_layer_ids": [1, 2], "mask_token_id": MASK},
        num_attention_heads=heads,
    )
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    matrices = {
        "self_attn.q_proj": (heads * 32, HIDDEN),
        "self_attn.k_proj": (64, HIDDEN),
        "self_attn.v_proj": (64, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads * 32),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    vectors = {
        "self_attn.q_norm": 32,
        "self_attn.k_norm": 32,
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
    }
    weights = {
        "fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        for name, shape in matrices.items():
            weights[f"layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator) * 0.2
        for name, size in vectors.items():
            weights[f"layers.{layer}.{name}.weight"] = torch.ones(size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
