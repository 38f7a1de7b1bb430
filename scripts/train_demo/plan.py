"""How much of everything: the sizes of the full recipe and of its smoke run."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field

from scripts.train_demo.report import elapsed, say
from scripts.train_demo.shapes import DraftShape, TargetShape


@dataclass(frozen=True)
class Plan:
    """Fixed step counts, sized for 430 s on one H200 with cold caches.

    The deadlines are a guard: a machine a quarter slower than that gets a shorter schedule instead of a longer run.
    """

    name: str
    target: TargetShape = field(default_factory=TargetShape)
    draft: DraftShape = field(default_factory=DraftShape)
    # data
    data_workers: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) * 3 // 4))
    file_limit: int | None = None
    # target
    target_batch: int = 32
    target_length: int = 2048
    target_steps: int = 3285
    # the target's own continuations
    rows: int = 4096
    rounds: int = 9
    prompt_tokens: int = 192
    continuation: int = 256
    sampled_share: float = 0.25
    sampled_temperature: float = 0.8
    # drafter
    draft_batch: int = 256
    anchors: int = 16
    draft_steps: int = 7508
    qualities: tuple[float, ...] = (0.25, 0.5, 1.0)
    cooldown_share: float = 0.2
    # evaluation
    prompts: int = 64
    new_tokens: int = 192
    heldout_windows: int = 96
    # seconds since the start by which a phase must be done
    target_deadline: float = 270.0
    draft_deadline: float = 470.0
    checkpoint_every: int = 1000  # steps

    def identity(self) -> dict:
        """What a work folder belongs to: everything but how the machine is used."""
        return {k: v for k, v in asdict(self).items() if k != "data_workers"}

    @classmethod
    def named(cls, name: str) -> Plan:
        if name == "full":
            return cls(name)
        if name != "smoke":
            raise SystemExit(f"plan {name!r}: there are 'full' and 'smoke'")
        return cls(
            name,
            target=TargetShape(hidden=64, ffn=96, gdn_dim=16, head_dim=32),
            draft=DraftShape(hidden=64, ffn=96, head_dim=16),
            data_workers=1,
            file_limit=60,
            target_batch=2,
            target_length=128,
            target_steps=6,
            rows=12,
            rounds=2,
            prompt_tokens=48,
            continuation=48,
            draft_batch=4,
            anchors=4,
            draft_steps=20,
            prompts=4,
            new_tokens=24,
            heldout_windows=2,
            target_deadline=math.inf,
            draft_deadline=math.inf,
            checkpoint_every=4,
        )


def steps_before(deadline: float, wanted: int, seconds: float, name: str) -> int:
    """`wanted` steps of `seconds` each, or as many as end before the deadline."""
    left = deadline - elapsed()
    if wanted * seconds <= left:
        return wanted
    if left <= seconds:
        raise SystemExit(
            f"{name}: its deadline, {deadline:.0f} s, is over; run again with the same --work to go on"
        )
    say(f"{name}: only {int(left / seconds)} of {wanted} steps end before its deadline, {deadline:.0f} s")
    return int(left / seconds)
