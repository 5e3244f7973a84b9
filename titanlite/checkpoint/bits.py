"""The conditions under which runs compute the same bits on any number of ranks, with
training.same_bits_on_any_ranks. Each manifest has them as `bits`."""

from __future__ import annotations

from typing import Any

from titanlite.checkpoint.resume import Candidate


def changes_since(resumed: Candidate, conditions: dict[str, Any]) -> list[str]:
    """The conditions that are not those of the checkpoint `resumed`, such as `local_batch_size 2 -> 4`."""
    before = resumed.manifest.get("bits")
    if before is None:
        return ["trained without training.same_bits_on_any_ranks"]
    return [f"{key} {before.get(key)} -> {now}" for key, now in conditions.items() if before.get(key) != now]


def bits_after(resumed: Candidate | None, conditions: dict[str, Any]) -> dict[str, Any]:
    """The conditions of a run that continues from the checkpoint `resumed`, for its manifests. `ended`, if
    there is any reason: why the run has other bits than one that was never resumed."""
    if resumed is None:
        return conditions
    earlier = resumed.manifest.get("bits", {}).get("ended", [])
    ended = [*earlier, *(f"step {resumed.step}: {change}" for change in changes_since(resumed, conditions))]
    return conditions | {"ended": ended} if ended else conditions
