"""Shapes of the two models, and the `config.json` files that SGLang 0.5.17 loads them by."""

from __future__ import annotations

from dataclasses import dataclass

END_OF_TEXT = 0


def common_config(shape: TargetShape | DraftShape) -> dict:
    """The entries of `config.json` that target and drafter share."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": False,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
    }


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 text hybrid: every `interval`-th layer is gated attention, the others are GatedDeltaNet (GDN)."""

    vocab: int = 4096
    first_reserved: int = 4032  # ids from here on never occur in text; the first is the drafter's mask token
    hidden: int = 256
    ffn: int = 544
    layers: int = 8
    interval: int = 4
    gdn_key_heads: int = 2
    gdn_value_heads: int = 6
    gdn_dim: int = 128
    conv: int = 4
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    rope_theta: float = 1e7
    eps: float = 1e-6

    @property
    def rotary_dim(self) -> int:
        return self.head_dim // 4

    @property
    def gdn_key_size(self) -> int:
        return self.gdn_key_heads * self.gdn_dim

    @property
    def gdn_value_size(self) -> int:
        return self.gdn_value_heads * self.gdn_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    def config(self) -> dict:
        """The contents of `config.json`."""
        pairs = self.rotary_dim // 2
        return common_config(self) | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "linear_num_key_heads": self.gdn_key_heads,
            "linear_num_value_heads": self.gdn_value_heads,
            "linear_key_head_dim": self.gdn_dim,
            "linear_value_head_dim": self.gdn_dim,
            "linear_conv_kernel_dim": self.conv,
            "full_attention_interval": self.interval,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {
                "rope_theta": int(self.rope_theta),
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                # Text positions only: the three sections share one position, their split does not matter.
                "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": END_OF_TEXT,
        }

    @classmethod
    def from_config(cls, config: dict, first_reserved: int) -> TargetShape:
        return cls(
            vocab=config["vocab_size"],
            first_reserved=first_reserved,
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            interval=config["full_attention_interval"],
            gdn_key_heads=config["linear_num_key_heads"],
            gdn_value_heads=config["linear_num_value_heads"],
            gdn_dim=config["linear_key_head_dim"],
            conv=config["linear_conv_kernel_dim"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            eps=config["rms_norm_eps"],
        )


@dataclass(frozen=True)
class DraftShape:
    """A DFlash drafter (arXiv 2602.06036) on the features of `target_layers`; embedding and head are the target's."""

    vocab: int = 4096
    mask: int = 4032
    hidden: int = 256
    ffn: int = 544
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    block: int = 16
    target_layers: tuple[int, ...] = (1, 3, 5, 6)
    target_depth: int = 8
    rope_theta: float = 1e7
    eps: float = 1e-6

    @property
    def horizon(self) -> int:
        """Tokens that one block drafts; its first row is the bonus token."""
        return self.block - 1

    def config(self) -> dict:
        """The contents of `config.json`."""
        return common_config(self) | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "rope_theta": int(self.rope_theta),
            "block_size": self.block,
            "num_target_layers": self.target_depth,
            "dflash_config": {"mask_token_id": self.mask, "target_layer_ids": list(self.target_layers)},
        }

    @classmethod
    def from_config(cls, config: dict) -> DraftShape:
        return cls(
            vocab=config["vocab_size"],
            mask=config["dflash_config"]["mask_token_id"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            block=config["block_size"],
            target_layers=tuple(config["dflash_config"]["target_layer_ids"]),
            target_depth=config["num_target_layers"],
            rope_theta=config["rope_theta"],
            eps=config["rms_norm_eps"],
        )
