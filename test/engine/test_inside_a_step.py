"""What a step leaves behind, seen from inside the scheduler process.

Engines are forked from this process, so a method wrapped here is wrapped there; the wrappers only write files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.dflash_reference import DFlashReference
from support.drafters import windowed_drafter
from support.engines import DRAFT, TARGET, engine, greedy
from support.prompts import PROMPTS

PROMPT, NEW_TOKENS = PROMPTS[1], 64


def states_of(runner, req_pool_indices) -> dict[str, torch.Tensor]:
    pool = runner.req_to_token_pool
    cache, slot = pool.mamba_pool.mamba_cache, pool.get_mamba_indices(req_pool_indices)[0].long()
    return {"recurrent": cache.temporal[:, slot].clone(), "conv": cache.conv[0][:, slot].clone()}


@pytest.fixture(scope="module")
def plain_states(tmp_path_factory):
    """State after every committed length, from decoding token by token."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    folder, forward = tmp_path_factory.mktemp("plain"), ModelRunner.forward

    def recording(self, forward_batch, *args, **kwargs):
        out = forward(self, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_decode():
            length = int(forward_batch.seq_lens[0])
            torch.save(states_of(self, forward_batch.req_pool_indices), folder / f"{length}.pt")
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", recording)
        with engine() as running:
            running.generate(PROMPT, greedy(NEW_TOKENS))
    return {int(p.stem): torch.load(p) for p in folder.glob("*.pt")}


@pytest.mark.parametrize(("budget", "cap"), [(1, 1), (4, 4), (15, 8), (64, 8), (128, 3)])
def test_state_after_every_commit_is_the_autoregressive_state(
    plain_states, budget, cap, monkeypatch, tmp_path
):
    """The fold is bitwise the recurrence (test/kernel/test_gdn_commit.py); what is left is fp32 rounding of the
    projections, whose GEMM adds up in another order for N rows than for one. Conv windows and recurrent states are each
    compared as one vector over all layers: 1e-6 relative is eight ulps."""
    from sglang_ddtree.worker import DDTreeWorker

    commit = DDTreeWorker._commit_target

    def recording(self, batch, accepted):
        commit(self, batch, accepted)
        length = int(batch.seq_lens[0] + accepted.lens[0])
        torch.save(states_of(self.model_runner, batch.req_pool_indices), tmp_path / f"{length}.pt")

    monkeypatch.setattr(DDTreeWorker, "_commit_target", recording)
    with engine(budget, cap) as running:
        running.generate(PROMPT, greedy(NEW_TOKENS))
    worst, worst_layer, compared = 0.0, 0.0, 0
    for path in tmp_path.glob("*.pt"):
        expected = plain_states.get(int(path.stem))
        if expected is None:  # the last step may commit beyond the requested length
            continue
        for name, state in torch.load(path).items():
            difference, reference = (state - expected[name]).flatten(1), expected[name].flatten(1)
            worst = max(worst, float(difference.norm() / reference.norm()))
            worst_layer = max(worst_layer, float((difference.norm(dim=1) / reference.norm(dim=1)).max()))
        compared += 1
    print(
        f"budget {budget}, cap {cap}: {compared} commits, relative difference {worst:.2g}"
        f" (of one layer {worst_layer:.2g})"
    )
    assert compared >= 3
    assert worst <= 1e-6


@pytest.mark.parametrize("window", [None, 40])
def test_served_drafter_equals_an_independent_forward(window, monkeypatch, tmp_path):
    from sglang_ddtree.draft.head import DraftHead
    from sglang_ddtree.worker import DDTreeWorker
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = DRAFT
    if window is not None:
        (tmp_path / "draft").mkdir()
        checkpoint = windowed_drafter(DRAFT, tmp_path / "draft", window)
    head, draft = DraftHead.__call__, DDTreeWorker._draft

    def recording_head(self, hidden):
        logprobs, ids = head(self, hidden)
        torch.save({"hidden": hidden, "logprobs": logprobs, "ids": ids}, tmp_path / "head.pt")
        return logprobs, ids

    def recording_draft(self, batch, slots):
        bonus, length = batch.spec_info.bonus_tokens.clone(), int(batch.seq_lens[0])
        tree = draft(self, batch, slots)
        seen = torch.load(tmp_path / "head.pt") | {"bonus": int(bonus[0]), "length": length}
        torch.save(seen, tmp_path / f"step{length}.pt")
        return tree

    monkeypatch.setattr(DraftHead, "__call__", recording_head)
    monkeypatch.setattr(DDTreeWorker, "_draft", recording_draft)
    with engine(15, draft=checkpoint) as running:
        output = running.generate(PROMPT, greedy(NEW_TOKENS))["output_ids"]

    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(TARGET).encode(PROMPT) + output
    with torch.no_grad():
        layers = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    wanted = json.loads((Path(checkpoint) / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    features = torch.cat([layers[i + 1][0] for i in wanted], dim=-1)
    reference = DFlashReference(checkpoint, target.get_input_embeddings().weight.detach())
    # With overlap scheduling one more step may run after the last token.
    steps = [seen for p in tmp_path.glob("step*.pt") if (seen := torch.load(p))["length"] < len(text)]
    assert len(steps) >= 5
    for seen in steps:
        assert text[seen["length"]] == seen["bonus"]
        hidden = reference(features[: seen["length"]], seen["bonus"])[1:]
        # fp32 with other summation orders through three layers, on values of order one.
        torch.testing.assert_close(seen["hidden"], hidden, atol=2e-4, rtol=2e-4)
        logprobs = torch.log_softmax(hidden @ target.lm_head.weight.detach().T, dim=-1)
        expected = logprobs.topk(8)
        torch.testing.assert_close(seen["logprobs"], expected.values, atol=1e-3, rtol=1e-3)
        # The same tokens, but for neighbours whose log-probs are closer than that rounding.
        distinct = (expected.values[:, :-1] - expected.values[:, 1:]).amin(-1) > 2e-3
        assert torch.equal(seen["ids"][distinct], expected.indices[distinct])
        assert bool(distinct.any())
