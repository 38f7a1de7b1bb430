"""The demo pair in bf16 on a GPU, graphs captured: the trees' text and states against plain decoding's.

Two forwards of one bf16 model in different batch shapes differ in the last bits of a logit (SGLang decodes one row, the
chain verifies 16, a tree N), so plain decoding's own best two may change places where they are this close: logits lie
between 8 and 16, where neighbours in bf16 are 1/16 apart, and a sum may end one neighbour off on either side.
"""

from __future__ import annotations

import pytest
import torch
from gpu import state_recorder
from support.engines import DRAFT, decode_plainly, engine, greedy, tau
from support.prompts import PROMPTS

from benchmark.serving.prompts import heldout_prompts
from benchmark.widen.folders import write_folders
from benchmark.widen.loader import GeneratedLoader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
NEW_TOKENS, TIE_GAP, LENGTH = 64, 0.125, 500
# Linear layers round their inputs to fp8, in steps 16 times those of bf16: a last bit that differs may flip one.
FP8_TIE_GAP = 0.5
GPU = dict(device="cuda", dtype="bfloat16", disable_prefill_cuda_graph=True, mem_fraction_static=0.3)


def gpu_engine(budget: int | None = None, **kwargs):
    return engine(budget, **(GPU | dict(attention_backend="triton") | kwargs))


@pytest.fixture(scope="module")
def plain():
    with gpu_engine() as running:
        return decode_plainly(running, PROMPTS, NEW_TOKENS)


def check_text(plain, outputs: list[dict], name: str, tie_gap: float = TIE_GAP) -> None:
    """Prints every divergence with its gap; none may stand where plain decoding was sure."""
    gaps = []
    for i, (reference, out) in enumerate(zip(plain, outputs, strict=True)):
        pairs = enumerate(zip(reference.tokens, out["output_ids"], strict=True))
        at = next((k for k, (a, b) in pairs if a != b), None)
        if at is not None:
            gaps.append((i, at, round(reference.gaps[at], 4)))
    print(f"{name}: {len(plain) - len(gaps)} of {len(plain)} texts equal; (prompt, token, gap): {gaps}")
    assert all(gap <= tie_gap for *_, gap in gaps)


@pytest.mark.parametrize("kwargs", [dict(budget=15), dict(budget=63), dict(budget=200), "chain"], ids=str)
def test_text(plain, kwargs, monkeypatch):
    """No step may wait for the device either: synchronising calls raise."""
    monkeypatch.setenv("SGLANG_DDTREE_CHECK_SYNC", "1")
    if kwargs == "chain":
        kwargs = dict(speculative_algorithm="DFLASH", speculative_draft_model_path=DRAFT)
    with gpu_engine(**kwargs) as running:
        for concurrency in (1, 5, 8):
            outputs = []
            for i in range(0, len(PROMPTS), concurrency):
                outputs += running.generate(PROMPTS[i : i + concurrency], greedy(NEW_TOKENS))
            check_text(plain, outputs, f"{kwargs}, {concurrency} at a time")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The demo pair widened until four ranks can split it: 8 query and 2 KV heads, 4 and 12 GDN heads."""
    target, draft = write_folders("mid", tmp_path_factory.mktemp("mid"))
    return dict(target=str(target), draft=str(draft), load_format=GeneratedLoader)


@pytest.fixture(scope="module")
def wide_plain(wide):
    with gpu_engine(**wide) as running:
        return decode_plainly(running, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_tensor_parallel(wide, wide_plain, tp):
    """Against one GPU token by token: ranks add their parts of a product in another order, which bf16 shows."""
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    with gpu_engine(31, tp_size=tp, **wide) as running:
        outputs = running.generate(PROMPTS, greedy(NEW_TOKENS))
    check_text(wide_plain, outputs, f"TP {tp}, tau {tau(outputs, NEW_TOKENS):.3f}")


def test_state_after_500_tokens(tmp_path):
    """Folding accepted paths must leave the state no farther from a prefill of the same text than plain decoding does.

    Prefill is the common yardstick, since in bf16 the two texts may differ: its chunked kernel computes the state of
    any given text. The bound leaves 30 % for the two texts' own spread.
    """
    texts, errors = {}, {}
    for name, budget in (("tree", 31), ("plain", None)):
        folder = tmp_path / name
        with (
            state_recorder.installed(folder, [LENGTH]),
            gpu_engine(budget, disable_radix_cache=True) as running,
        ):
            texts[name] = []
            for prompt in PROMPTS[:6]:
                out = running.generate(prompt, greedy(LENGTH + 40))
                prompt_ids = running.tokenizer_manager.tokenizer.encode(prompt)
                texts[name].append(prompt_ids + out["output_ids"])
            if name == "plain":
                decoded = {n: load(tmp_path / n) for n in texts}
                for n, states in decoded.items():
                    for text, state in zip(texts[n], states, strict=True):
                        running.generate(input_ids=text[: state["length"]], sampling_params=greedy(3))
                    prefilled = load(folder)[-len(states) :]
                    errors[n] = [relative(a, b) for a, b in zip(states, prefilled, strict=True)]
    for kind in ("recurrent", "conv"):
        tree, alone = (sum(e[kind] for e in errors[n]) / len(errors[n]) for n in ("tree", "plain"))
        print(f"{kind}: distance from prefill {tree:.4f} by tree, {alone:.4f} token by token")
        assert tree <= 1.3 * alone


def load(folder) -> list[dict]:
    return [torch.load(p) for p in sorted(folder.glob("*.pt"))]


def relative(a: dict, b: dict) -> dict[str, float]:
    assert a["length"] == b["length"]
    return {
        kind: float((a[kind].float() - b[kind].float()).norm() / b[kind].float().norm())
        for kind in ("recurrent", "conv")
    }


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(attention_backend="flashinfer"),
        dict(quantization="fp8"),
        dict(disable_cuda_graph=True),
        dict(disable_overlap_schedule=True),
    ],
    ids=str,
)
def test_other_servers(kwargs):
    """Against plain decoding under the same flags."""
    with gpu_engine(**kwargs) as running:
        reference = decode_plainly(running, PROMPTS[:8], NEW_TOKENS)
    with gpu_engine(31, **kwargs) as running:
        outputs = running.generate(PROMPTS[:8], greedy(NEW_TOKENS))
    check_text(reference, outputs, str(kwargs), FP8_TIE_GAP if "quantization" in kwargs else TIE_GAP)


@pytest.mark.parametrize("sizes", [None, [64, 128, 256, 512]], ids=["eager prefill", "captured prefill"])
def test_second_turn(sizes):
    """Turns that go on from the prefix cache, one of whose checkpoints prefill left and another a verify step.

    384 tokens of prompt and 200 of an answer cross 256 and 512, where SGLang keeps checkpoints.
    """
    texts = heldout_prompts()
    prefill = dict(disable_prefill_cuda_graph=sizes is None) | (
        {"cuda_graph_bs_prefill": sizes} if sizes else {}
    )
    with gpu_engine(31, **prefill) as running:
        encode = running.tokenizer_manager.tokenizer.encode
        firsts = [encode(texts[i] + texts[i + 1]) for i in range(0, 16, 2)]
        cached, turns, answers = 0, [], []
        for ids, question in zip(firsts, texts[16:24], strict=True):
            answer = running.generate(input_ids=ids, sampling_params=greedy(200))["output_ids"]
            turns += [ids, ids + answer + encode(question)]
            second = running.generate(input_ids=turns[-1], sampling_params=greedy(NEW_TOKENS))
            cached += second["meta_info"]["cached_tokens"]
            answers += [dict(output_ids=answer[:NEW_TOKENS]), second]
    assert cached >= 512 * len(firsts)
    with gpu_engine(disable_radix_cache=True) as running:
        reference = decode_plainly(running, turns, NEW_TOKENS)
    check_text(reference, answers, f"turns, prefill captured at {sizes}")


def test_long_context(monkeypatch):
    """33,000 tokens in chunks of 8,192, keys split over programs; then the prompt again from the prefix cache."""
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    long = dict(context_length=40_000, max_total_tokens=80_000, chunked_prefill_size=8192)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 4000, (n,), generator=draw).tolist() for n in (33_000, 12_345)]
    with gpu_engine(**long) as running:
        reference = decode_plainly(running, prompts, NEW_TOKENS)
    with gpu_engine(63, **long) as running:
        for _ in range(2):
            outputs = running.generate(input_ids=prompts, sampling_params=greedy(NEW_TOKENS))
            check_text(reference, outputs, "long context")
