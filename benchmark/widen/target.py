"""The wide target: every tensor of a Qwen3.5 text checkpoint from those of the small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmark.widen.rules import grouped_heads, sources, tile
from benchmark.widen.tensors import FAINT, Builder, Copied, Split, WideModel

if TYPE_CHECKING:
    from benchmark.widen.shapes import SmallPair, Widening


def wide_target(pair: SmallPair, widening: Widening, padding: torch.Tensor) -> WideModel:
    """padding: bf16 [2, small hidden], the head's rows of the ids that the small vocabulary lacks, in turn.

    Raises ValueError, naming the dimension, if the wide shape is no multiple of the small one.
    """
    small, wide, weights = pair.target, widening.target, pair.target_weights
    device = padding.device
    build = Builder(weights)

    hidden = tile("hidden", small.hidden, wide.hidden, device)
    ffn = tile("ffn", small.ffn, wide.ffn, device)
    keys = tile("gdn_key_heads", small.gdn_key_heads, wide.gdn_key_heads, device)
    values = tile("gdn_value_heads", small.gdn_value_heads, wide.gdn_value_heads, device)
    if small.gdn_value_heads * wide.gdn_key_heads != wide.gdn_value_heads * small.gdn_key_heads:
        raise ValueError("gdn_value_heads: as many must read a key head as in the small pair")
    key_entries, value_entries = keys.blocks(small.gdn_dim), values.blocks(small.gdn_dim)
    mixed = torch.cat(  # q | k | v, each tiled on its own
        [
            key_entries.small,
            small.gdn_key_size + key_entries.small,
            2 * small.gdn_key_size + value_entries.small,
        ]
    )
    heads, kv_heads = grouped_heads(small.heads, small.kv_heads, wide.heads, wide.kv_heads, device)
    head_entries, kv_entries = heads.blocks(small.head_dim), kv_heads.blocks(small.head_dim)
    queries_and_gates = heads.blocks(2 * small.head_dim)

    vocab = torch.arange(wide.vocab, device=device)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    # The ids of the padding never occur in a text; their embeddings only have to be numbers.
    build.tensors[embedding] = Copied(weights[embedding], vocab % small.vocab, hidden.small)
    for layer, source in enumerate(sources(widening.placed, wide.layers, wide.interval)):
        p, s = f"model.layers.{layer}.", f"model.layers.{source}."
        out = 1.0 if layer in widening.placed else FAINT
        build.norms_and_mlp(p, s, hidden, ffn, out)
        if wide.is_attention(layer):
            build.attention(p, s, queries_and_gates.small, kv_entries, head_entries, hidden, out)
        else:
            p, s = p + "linear_attn.", s + "linear_attn."
            build.split(p + "in_proj_qkv.weight", s + "in_proj_qkv.weight", mixed, hidden)
            build.split(p + "in_proj_z.weight", s + "in_proj_z.weight", value_entries.small, hidden)
            build.split(p + "in_proj_b.weight", s + "in_proj_b.weight", values.small, hidden)
            build.split(p + "in_proj_a.weight", s + "in_proj_a.weight", values.small, hidden)
            build.copy(p + "conv1d.weight", s + "conv1d.weight", mixed)
            build.copy(p + "A_log", s + "A_log", values.small)
            build.copy(p + "dt_bias", s + "dt_bias", values.small)
            build.copy(p + "norm.weight", s + "norm.weight")
            build.split(p + "out_proj.weight", s + "out_proj.weight", hidden.small, value_entries, out)
    build.copy("model.norm.weight", "model.norm.weight", hidden.small)
    rows = torch.where(vocab < small.vocab, vocab, small.vocab + vocab % len(padding))
    build.tensors[head] = Split(head, torch.cat([weights[head], padding]), rows, hidden)
    return WideModel(build.tensors)
