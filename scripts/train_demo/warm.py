"""Compiles in a process of its own, into the caches that the recipe's processes share.

python -m scripts.train_demo.warm full kernels 1      # the GDN kernels, autotuning candidate 1 first
python -m scripts.train_demo.warm full draft          # the drafter's regions
"""

from __future__ import annotations

import sys

import torch

from scripts.train_demo import kernels
from scripts.train_demo.draft import Draft, initial_draft
from scripts.train_demo.generate import PREFILL_ROWS
from scripts.train_demo.plan import Plan
from scripts.train_demo.report import say

GRADIENT_TOLERANCE = 0.02


def warm_kernels(plan: Plan, first_config: int) -> None:
    """Compiles every candidate of every kernel; the process with candidate 1 checks the gradients as well."""
    kernels.prepare(first_config)
    s, device = plan.target, "cuda"

    def draw(batch, length, *shape, grad):
        x = torch.randn(batch, length, *shape, device=device, dtype=torch.bfloat16)
        return x.requires_grad_(grad)

    def inputs(batch, length, grad):
        q, k = (draw(batch, length, s.gdn_key_heads, s.gdn_dim, grad=grad) for _ in range(2))
        v = draw(batch, length, s.gdn_value_heads, s.gdn_dim, grad=grad)
        g = -torch.rand(batch, length, s.gdn_value_heads, device=device)
        return q, k, v, g.requires_grad_(grad), draw(batch, length, s.gdn_value_heads, grad=grad)

    o, _ = kernels.chunk_rule(*inputs(plan.target_batch, plan.target_length, True))
    o.sum().backward()
    with torch.no_grad():
        _, state = kernels.chunk_rule(*inputs(PREFILL_ROWS, plan.prompt_tokens, False), final_state=True)
        kernels.recurrent_rule(*inputs(PREFILL_ROWS, 1, False), state.contiguous())
    torch.cuda.synchronize()
    if first_config == 1:
        error = kernels.gradient_error(s.gdn_key_heads, s.gdn_value_heads, s.gdn_dim, device)
        say(f"GDN kernels: greatest relative error of output and gradients {error:.4f}")
        if not error < GRADIENT_TOLERANCE:
            raise SystemExit(f"GDN kernels: gradients are off by {error:.3f}, more than {GRADIENT_TOLERANCE}")


def draft_step(plan: Plan, draft: Draft) -> torch.Tensor:
    """The drafter's loss on random data of the training shape, backward included."""
    length = plan.prompt_tokens + plan.continuation
    features = torch.randn(
        plan.draft_batch,
        length,
        draft.embedding.shape[1] * len(plan.draft.target_layers),
        device=draft.device,
    )
    ids = torch.randint(plan.target.first_reserved, (plan.draft_batch, length), device=draft.device)
    anchors = torch.randint(
        plan.prompt_tokens, length - plan.draft.block, (plan.draft_batch, plan.anchors), device=draft.device
    )
    loss = draft.loss(features.to(draft.dtype), ids, anchors)
    loss.backward()
    return loss


def warm_draft(plan: Plan, device: str = "cuda") -> None:
    weights = {k: v.requires_grad_() for k, v in initial_draft(plan.draft, 0, device).items()}
    # Two tensors of their own, as in the recipe: Inductor's cache tells views apart.
    embedding, head = (torch.randn(plan.target.vocab, plan.target.hidden, device=device) for _ in range(2))
    draft_step(plan, Draft(plan.draft, weights, embedding, head, compiled=True))


if __name__ == "__main__":
    chosen = Plan.named(sys.argv[1])
    if sys.argv[2] == "kernels":
        warm_kernels(chosen, int(sys.argv[3]))
    else:
        warm_draft(chosen)
    say(f"compiled: {' '.join(sys.argv[2:])}")
