"""The warmup-stable-decay learning-rate schedule (Hu et al. 2024, MiniCPM), with torchtitan's keys."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.optim.phases import ThreePhases


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(ThreePhases, name="warmup_stable_decay"):
    """Linear warmup, a constant phase (by default none), then decay to min_lr_factor (docs/numerics.md)."""

    def middle(self, step: int, warmup: int) -> float:
        return 1.0
