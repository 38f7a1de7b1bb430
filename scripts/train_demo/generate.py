"""Batched decoding of the target, with the features that the drafter is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from scripts.train_demo import kernels
from scripts.train_demo.layers import rotary_table
from scripts.train_demo.target import (
    ATTENTION_INPUT,
    ATTENTION_OUTPUT,
    GDN_INPUT,
    GDN_OUTPUT,
    Target,
)

PREFILL_ROWS = 512
EMBEDDING = "model.embed_tokens.weight"


@dataclass
class Continuations:
    """Prompts and what the target made of them."""

    tokens: torch.Tensor  # int64 [n, prompt + new]
    features: torch.Tensor  # compute dtype [n, prompt + new, k * hidden], the target's at each token
    prompt: int


class Generator:
    """Static buffers for `rows` sequences of `prompt + new` tokens; on a GPU one CUDA graph per token."""

    def __init__(self, target: Target, feature_layers: tuple[int, ...], rows: int, prompt: int, new: int):
        s, device, dtype = target.shape, target.device, target.dtype
        rounded = {
            name: w.detach().to(dtype if w.dim() > 1 else torch.float32) for name, w in target.weights.items()
        }
        self.target = Target(s, rounded)
        self.feature_layers, self.rows, self.prompt, self.new = feature_layers, rows, prompt, new
        length, mixed = prompt + new, 2 * s.gdn_key_size + s.gdn_value_size

        def zeros(*shape, dtype=dtype):
            return torch.zeros(*shape, dtype=dtype, device=device)

        gdn = [i for i in range(s.layers) if not s.is_attention(i)]
        attention = [i for i in range(s.layers) if s.is_attention(i)]
        state = (s.gdn_value_heads, s.gdn_dim, s.gdn_dim)
        self.window = {i: zeros(rows, s.conv - 1, mixed) for i in gdn}
        self.state = {i: zeros(rows, *state, dtype=torch.float32) for i in gdn}
        self.keys = {i: zeros(rows, s.kv_heads, length, s.head_dim) for i in attention}
        self.values = {i: zeros(rows, s.kv_heads, length, s.head_dim) for i in attention}
        self.tokens = zeros(rows, length, dtype=torch.long)
        self.features = zeros(rows, length, len(feature_layers) * s.hidden)
        self.temperatures = zeros(rows, 1, dtype=torch.float32)
        self.next = zeros(rows, dtype=torch.long)
        self.position = zeros(1, dtype=torch.long)
        self.places = torch.arange(length, device=device)
        self.graph = None

    def _pick(self, hidden: torch.Tensor) -> None:
        """The next token by the Gumbel trick, which is the argmax at temperature 0; no reserved id."""
        logits = self.target.logits(hidden)[:, : self.target.shape.first_reserved]
        noise = torch.empty_like(logits).exponential_().log_()
        self.next.copy_((logits - noise * self.temperatures).argmax(-1))

    def _prefill(self, ids: torch.Tensor) -> None:
        t, s = self.target, self.target.shape
        table = rotary_table(self.places[: self.prompt], s.rotary_dim, s.rope_theta, t.dtype)
        last = []
        for start in range(0, self.rows, PREFILL_ROWS):
            rows = slice(start, start + PREFILL_ROWS)
            x, features = t.embed(ids[rows], t.weights[EMBEDDING]), []
            for i in range(s.layers):
                if s.is_attention(i):
                    q, k, v, gate = t.attention_input(x, *table, *t.layer(i, ATTENTION_INPUT))
                    self.keys[i][rows, :, : self.prompt] = k
                    self.values[i][rows, :, : self.prompt] = v
                    group = s.heads // s.kv_heads
                    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    x = t.attention_output(x, o, gate, *t.layer(i, ATTENTION_OUTPUT))
                else:
                    weights = t.layer(i, GDN_INPUT)
                    mixed, z, b, a = t.gdn_projections(x, *weights[:5])
                    self.window[i][rows] = mixed[:, 1 - s.conv :]
                    mixed = F.pad(mixed, (0, 0, s.conv - 1, 0))
                    *rule, z = t.gdn_mix(mixed, z, b, a, *weights[5:])
                    o, self.state[i][rows] = kernels.chunk_rule(*rule, final_state=True)
                    x = t.gdn_output(x, o, z, *t.layer(i, GDN_OUTPUT))
                if i in self.feature_layers:
                    features.append(x)
            self.features[rows, : self.prompt] = torch.cat(features, dim=-1)
            last.append(x[:, -1])
        self.tokens[:, : self.prompt] = ids
        self.position.fill_(self.prompt)
        self._pick(torch.cat(last))

    def _step(self) -> None:
        t, s = self.target, self.target.shape
        self.tokens.index_copy_(1, self.position, self.next.unsqueeze(1))
        x, features = t.embed(self.next.unsqueeze(1), t.weights[EMBEDDING]), []
        table = rotary_table(self.position, s.rotary_dim, s.rope_theta, t.dtype)
        for i in range(s.layers):
            if s.is_attention(i):
                q, k, v, gate = t.attention_input(x, *table, *t.layer(i, ATTENTION_INPUT))
                self.keys[i].index_copy_(2, self.position, k)
                self.values[i].index_copy_(2, self.position, v)
                q = q.unflatten(1, (s.kv_heads, -1)).squeeze(3)
                scores = (q @ self.keys[i].transpose(-1, -2)).float() * s.head_dim**-0.5
                scores = scores.masked_fill(self.places > self.position, -torch.inf).softmax(-1)
                o = (scores.to(t.dtype) @ self.values[i]).flatten(1, 2).unsqueeze(2)
                x = t.attention_output(x, o, gate, *t.layer(i, ATTENTION_OUTPUT))
            else:
                weights = t.layer(i, GDN_INPUT)
                mixed, z, b, a = t.gdn_projections(x, *weights[:5])
                mixed = torch.cat([self.window[i], mixed], dim=1)
                self.window[i].copy_(mixed[:, 1:])
                *rule, z = t.gdn_mix(mixed, z, b, a, *weights[5:])
                o = kernels.recurrent_rule(*rule, self.state[i])
                x = t.gdn_output(x, o, z, *t.layer(i, GDN_OUTPUT))
            if i in self.feature_layers:
                features.append(x)
        self.features.index_copy_(1, self.position, torch.cat(features, dim=-1))
        self.position += 1
        self._pick(x[:, 0])

    @torch.no_grad()
    def capture(self) -> None:
        """Records one token's step; without it, or on a CPU, steps run eagerly."""
        if not self.tokens.is_cuda:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.position.fill_(self.prompt)
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.position.fill_(self.prompt)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, temperatures: torch.Tensor) -> Continuations:
        """ids int64 [rows, prompt], temperatures [rows]. The result is a view: it lasts until the next call."""
        self.temperatures.copy_(temperatures.unsqueeze(1))
        self._prefill(ids)
        for _ in range(self.new):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
        return Continuations(self.tokens, self.features, self.prompt)
