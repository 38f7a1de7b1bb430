"""Bytes, floating-point operations, kernels and dependent steps of one decode step, as closed formulas.

Counted per GPU from the models' configs: weights read once per forward, committed KV, GDN states, activations into and
out of every product, logits. Not counted: the scheduler, prefill, and what the L2 cache saves.

Sources of the layer shapes: transformers' `Qwen3_5ForCausalLM` (gated attention; GatedDeltaNet, arXiv 2412.06464) and
the DFlash drafter (arXiv 2602.06036). Of the methods: a profile of SGLang 0.5.17's DFLASH, and docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

BF16, FP32 = 2, 4
ROW_BLOCK = 16  # rows of a tree that one dependent step of gdn_tree_verify takes (docs/kernels.md)
KEY_BLOCK = 64  # committed keys that one program of the stock extend kernel takes at a time
# Kernels per layer: estimates from reading the layers' forward, not counted in a trace (`benchmark.steps --profile`
# would). The price of a kernel is fitted, so only their proportions matter.
GDN_KERNELS, ATTENTION_KERNELS, DRAFT_KERNELS, TAIL_KERNELS, TREE_KERNELS = 12, 15, 14, 6, 12


@dataclass(frozen=True)
class Cost:
    """Of one step on one GPU. flops: of matrix products. serial: steps inside kernels that wait for each other.

    reduced: bytes that one all-reduce carries; all_reduces: how many there are.
    """

    bytes: float = 0.0
    flops: float = 0.0
    launches: float = 0.0
    serial: float = 0.0
    all_reduces: float = 0.0
    reduced: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        sums = {k: getattr(self, k) + getattr(other, k) for k in ("bytes", "flops", "launches", "serial")}
        count = self.all_reduces + other.all_reduces
        carried = self.all_reduces * self.reduced + other.all_reduces * other.reduced
        return Cost(**sums, all_reduces=count, reduced=carried / count if count else 0.0)


@dataclass(frozen=True)
class Target:
    """A Qwen3.5 text hybrid's sizes in elements. kv, q: widths of one layer's keys and queries over all heads."""

    vocab: int
    hidden: int
    ffn: int
    gdn_layers: int
    attention_layers: int
    q: int
    kv: int
    head_dim: int
    gdn_keys: int
    gdn_values: int
    gdn_value_heads: int
    gdn_dim: int
    conv: int

    @classmethod
    def from_config(cls, c: dict) -> Target:
        """c: the contents of config.json."""
        attention = c["num_hidden_layers"] // c["full_attention_interval"]
        return cls(
            vocab=c["vocab_size"],
            hidden=c["hidden_size"],
            ffn=c["intermediate_size"],
            gdn_layers=c["num_hidden_layers"] - attention,
            attention_layers=attention,
            q=c["num_attention_heads"] * c["head_dim"],
            kv=c["num_key_value_heads"] * c["head_dim"],
            head_dim=c["head_dim"],
            gdn_keys=c["linear_num_key_heads"] * c["linear_key_head_dim"],
            gdn_values=c["linear_num_value_heads"] * c["linear_value_head_dim"],
            gdn_value_heads=c["linear_num_value_heads"],
            gdn_dim=c["linear_key_head_dim"],
            conv=c["linear_conv_kernel_dim"],
        )

    @property
    def layers(self) -> int:
        return self.gdn_layers + self.attention_layers

    @property
    def qkv(self) -> int:
        """Channels of a GDN layer's convolution: queries, keys, values."""
        return 2 * self.gdn_keys + self.gdn_values

    @property
    def mlp(self) -> int:
        """Elements of the three products of one gated MLP."""
        return 3 * self.hidden * self.ffn

    @property
    def gdn_products(self) -> int:
        """in_proj of q, k, v, of z, of a and b; out_proj."""
        return self.hidden * (self.qkv + self.gdn_values + 2 * self.gdn_value_heads + self.gdn_values)

    @property
    def attention_products(self) -> int:
        """Queries with their output gate, keys, values; o_proj."""
        return self.hidden * (2 * self.q + 2 * self.kv + self.q)

    @property
    def products(self) -> int:
        """Elements of all layers' matrices, the head apart: each is read once a forward, and used once a row."""
        return (
            self.gdn_layers * self.gdn_products
            + self.attention_layers * self.attention_products
            + self.layers * self.mlp
        )

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def small(self) -> int:
        """Norms, convolutions and decay parameters."""
        gdn = self.qkv * self.conv + 2 * self.gdn_value_heads + self.gdn_dim
        return (
            self.gdn_layers * gdn
            + self.attention_layers * 2 * self.head_dim
            + (2 * self.layers + 1) * self.hidden
        )

    @property
    def parameters(self) -> int:
        """All of them; the embedding is stored but a forward reads only its rows."""
        return self.products + self.small + 2 * self.head

    @property
    def state_bytes(self) -> int:
        """GDN states of one request, fp32: K x V of every value head and layer."""
        return self.gdn_layers * self.gdn_values * self.gdn_dim * FP32

    @property
    def stash_bytes(self) -> int:
        """What a commit needs of one row: the convolution's inputs in bf16, a and b."""
        return self.gdn_layers * (self.qkv + 2 * self.gdn_value_heads) * BF16

    def forward(self, rows: int, requests: int, context: int, tp: int) -> Cost:
        """Every layer and the head on `rows` rows in all. States apart: methods treat them differently."""
        width = 6 * self.hidden + self.qkv + 2 * self.gdn_values + 3 * self.ffn
        activations = rows * self.layers * width * BF16
        weights = (self.products + self.small + self.head) * BF16
        kv_heads = self.kv // self.head_dim
        kv = requests * context * self.attention_layers * 2 * self.kv * BF16 * tp / min(tp, kv_heads)
        scores = 4 * rows * context * self.q * self.attention_layers
        states = 8 * rows * self.gdn_layers * self.gdn_values * self.gdn_dim
        logits = rows * self.vocab * (BF16 + BF16)  # written, then read by whoever takes the token
        return Cost(
            bytes=(weights + kv + activations + logits) / tp,
            flops=(2 * rows * (self.products + self.head) + scores + states) / tp,
            launches=self.gdn_layers * GDN_KERNELS + self.attention_layers * ATTENTION_KERNELS + TAIL_KERNELS,
            all_reduces=2 * self.layers if tp > 1 else 0,
            reduced=rows * self.hidden * BF16,
        )


@dataclass(frozen=True)
class Draft:
    """A DFlash drafter's sizes in elements; embedding and head are the target's. features: target layers it reads."""

    hidden: int
    ffn: int
    layers: int
    q: int
    kv: int
    head_dim: int
    features: int
    block: int

    @classmethod
    def from_config(cls, c: dict) -> Draft:
        return cls(
            hidden=c["hidden_size"],
            ffn=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            q=c["num_attention_heads"] * c["head_dim"],
            kv=c["num_key_value_heads"] * c["head_dim"],
            head_dim=c["head_dim"],
            features=len(c["dflash_config"]["target_layer_ids"]),
            block=c["block_size"],
        )

    @property
    def layer(self) -> int:
        return self.hidden * (2 * self.q + 2 * self.kv) + 3 * self.hidden * self.ffn

    @property
    def context(self) -> int:
        """Of committed tokens: target features to one vector (fc), that to every layer's keys and values."""
        return self.hidden * self.features * self.hidden + self.layers * 2 * self.kv * self.hidden

    @property
    def parameters(self) -> int:
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim) + 2 * self.hidden
        return self.layers * self.layer + self.features * self.hidden * self.hidden + norms

    def forward(self, target: Target, requests: int, context: int, committed: int, tp: int) -> Cost:
        """One block per request through the drafter and the target's head, then the draft KV of what was committed.

        context: tokens whose draft KV is read, at most; committed: tokens of one request and step.
        """
        rows, drafted = requests * self.block, requests * (self.block - 1)
        weights = (self.layers * self.layer + self.context + target.head) * BF16
        kv_heads = self.kv // self.head_dim
        kv = requests * context * self.layers * 2 * self.kv * BF16 * tp / min(tp, kv_heads)
        activations = rows * self.layers * (6 * self.hidden + 2 * self.q + 3 * self.ffn) * BF16
        logits = drafted * target.vocab * (BF16 + BF16)
        products = (
            rows * self.layers * self.layer + drafted * target.head + requests * committed * self.context
        )
        return Cost(
            bytes=(weights + kv + activations + logits) / tp,
            flops=(2 * products + 4 * rows * context * self.q * self.layers) / tp,
            launches=self.layers * DRAFT_KERNELS + TREE_KERNELS,
            all_reduces=2 * self.layers + 1 if tp > 1 else 0,
            reduced=rows * self.hidden * BF16,
        )


def plain(target: Target, requests: int, context: int, tp: int = 1) -> Cost:
    """Decoding token by token: each state is read and written once."""
    return target.forward(requests, requests, context, tp) + Cost(
        bytes=2 * requests * target.state_bytes / tp
    )


def chain(target: Target, draft: Draft, requests: int, context: int, committed: int, tp: int = 1) -> Cost:
    """SGLang's DFLASH: one row after another in GDN layers, a copy of the state after each, the last accepted kept.

    Its extend kernel walks the committed keys of a request one block after another.
    """
    rows = draft.block
    states = (1 + rows + 2) * requests * target.state_bytes  # read; snapshots; the accepted one moved
    serial = target.gdn_layers * rows + (target.attention_layers + draft.layers) * ceil(context / KEY_BLOCK)
    return (
        target.forward(requests * rows, requests, context, tp)
        + draft.forward(target, requests, context, committed, tp)
        + Cost(bytes=states / tp, serial=serial)
    )


def tree(
    target: Target, draft: Draft, budget: int, requests: int, context: int, committed: int, tp: int = 1
) -> Cost:
    """DDTREE: the state read once for all rows, the rows' projections stashed, the accepted path folded."""
    rows = budget + 1
    states = (1 + 2) * requests * target.state_bytes
    stash = requests * (rows + committed) * target.stash_bytes
    return (
        target.forward(requests * rows, requests, context, tp)
        + draft.forward(target, requests, context, committed, tp)
        + Cost(bytes=(states + stash) / tp, serial=target.gdn_layers * ceil(rows / ROW_BLOCK))
    )
