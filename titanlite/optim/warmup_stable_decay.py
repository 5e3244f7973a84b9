"""The warmup-stable-decay learning-rate schedule (Hu et al. 2024, MiniCPM), with torchtitan's keys."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.optim.phases import ThreePhases


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(ThreePhases, name="warmup_stable_decay"):
    """Linear warmup to the peak, a constant phase, then decay to min_lr_factor. The default has no constant
    phase. docs/numerics.md has the formula."""

    def middle(self, step: int, warmup: int) -> float:
        return 1.0
