"""Outlier steps: steps whose loss or gradient norm lies far above the values of the steps before.

The device decides, without host synchronisation. It compares the loss and the logarithm of the gradient norm,
whose distribution is skewed, with the newest accepted steps: with their median, in units of the standard
deviation that their median absolute deviation (MAD) stands for. Steps that are skipped do not enter the
window, so that neither a NaN nor a series of outliers changes what later steps are compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from titanlite.metrics.spikes import MAD_TO_SIGMA

FLOORS = (0.01, 0.05)  # least standard deviation of the loss, in nats, and of the logarithm of the norm
ENOUGH_STEPS = 64  # accepted steps to decide by, or all of a smaller window
TINY = torch.finfo(torch.float32).tiny  # the least norm whose logarithm is taken


class Evidence(NamedTuple):
    """How far a step lies above the accepted steps before it. The medians and deviations are NaN while the
    window has too few steps.

    `streak`: outliers skipped in a row up to this step. `restarted`: whether the step was applied although it
    is an outlier, because too many before it were, and the window starts anew with it. `..._sigmas`: distance
    from the median in standard deviations."""

    streak: float
    restarted: float
    loss_median: float
    log_norm_median: float
    loss_sigmas: float
    log_norm_sigmas: float


class Outliers:
    """Finds outlier steps on the device. The state is the window of accepted steps and the streak, which is
    the number of outliers skipped since the last accepted step."""

    def __init__(self, sigma: float, window: int, max_consecutive: int, device: torch.device):
        """`window`: the number of accepted steps in a full window."""
        self._window, self._min_window = window, min(window, ENOUGH_STEPS)
        self._max_consecutive = max_consecutive
        self.sigma = torch.tensor(sigma, dtype=torch.float32).item()  # as the device compares it
        self._values = torch.full((2, self._window), torch.nan, device=device)  # losses, log norms
        self._count = torch.zeros((), dtype=torch.int64, device=device)  # steps accepted into the window
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(self._window, device=device)
        self._floors = torch.tensor(FLOORS, device=device)

    def judge(
        self, loss: torch.Tensor, grad_norm: torch.Tensor, usable: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether to apply a step's update, and the step's Evidence as a tensor. No host synchronisation.

        `usable`: whether the step would be applied but for this judgement; other steps change nothing here.
        All three are fp32 or bool scalars on the device and equal on all ranks, and so is the decision."""
        values = torch.stack([loss, grad_norm.clamp(min=TINY).log()])
        num = self._count.clamp(max=self._window)
        medians = median(self._values, num)
        deviations = median((self._values - medians[:, None]).abs(), num)
        sigmas = (values - medians) / torch.maximum(MAD_TO_SIGMA * deviations, self._floors)
        is_high = usable & (num >= self._min_window) & (sigmas > self.sigma).any()
        too_many = self._streak >= self._max_consecutive
        skip, restart = is_high & ~too_many, is_high & too_many
        apply = usable & ~skip
        self._streak = torch.where(apply, 0, self._streak + skip)
        self._accept(values, apply, restart)
        known = torch.where(num >= self._min_window, torch.cat([medians, sigmas]), torch.nan)
        return apply, torch.cat([torch.stack([self._streak.float(), restart.float()]), known])

    def _accept(self, values: torch.Tensor, apply: torch.Tensor, restart: torch.Tensor) -> None:
        """If `restart`, empty the window; then, if `apply`, put `values` in the place of the oldest ones."""
        kept = torch.where(restart, torch.nan, self._values)
        count = torch.where(restart, 0, self._count)
        is_place = (self._places == count % self._window) & apply
        self._values = torch.where(is_place, values[:, None], kept)
        self._count = count + apply

    def restart(self) -> None:
        """Empty the window. No host synchronisation."""
        self._values = torch.full_like(self._values, torch.nan)
        self._count, self._streak = torch.zeros_like(self._count), torch.zeros_like(self._streak)

    def in_streak(self) -> bool:
        """Whether outliers were skipped since the last accepted step. Waits for the device."""
        return self._streak.item() > 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for train.json; the steps in their order. Waits for the device."""
        count = int(self._count.item())
        first = count % self._window if count > self._window else 0
        losses, log_norms = self._values.roll(-first, dims=1)[:, : min(count, self._window)].tolist()
        return {"streak": int(self._streak.item()), "losses": losses, "log_norms": log_norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. If the window is smaller than its own was, the newest steps remain."""
        newest = torch.tensor([state["losses"], state["log_norms"]])[:, -self._window :]
        self._values.fill_(torch.nan)
        self._values[:, : newest.shape[1]] = newest.to(self._values)
        self._count.fill_(newest.shape[1])
        self._streak.fill_(state["streak"])


NO_OUTLIERS: dict[str, Any] = {"streak": 0, "losses": [], "log_norms": []}  # the state without this judgement


def median(values: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    """Medians of the rows of `values` [R, W], of which `num` numbers in each row are not NaN: [R]. `num`:
    integer scalar on the device. NaN if `num` is 0."""
    ordered = values.sort(dim=1).values  # NaN last
    middle = torch.stack([num - 1, num]).clamp(min=0) // 2
    return ordered.index_select(1, middle).mean(dim=1)
