"""Messages about run identities that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint.run_identity import check_identity
from titanlite.config.component import ConfigError


def test_a_past_schedule_that_an_amount_has_changed_names_its_number() -> None:
    """A change of training.global_batch_size makes another number of steps of "640 tokens"."""

    def identity(warmup_steps: int) -> dict[str, Any]:
        schedule = {"name": "warmup_stable_decay", "warmup_steps": warmup_steps}
        first = {"first_sequence": 0, "sources": {"a": 1000}, "lr_scheduler": schedule}
        return {"stages": [first, {"first_sequence": 80, "sources": {"a": 1000}}]}

    assert check_identity(identity(2), identity(1), [], Path(), 80) == []  # the stage that the run is in
    with pytest.raises(ConfigError) as error:
        check_identity(identity(2), identity(1), [], Path(), 81)
    assert error.value.key == "stages.0.lr_scheduler.warmup_steps"
    assert str(error.value) == (
        "lr_scheduler.warmup_steps of stage 1 was 2, is 1. The run is at sequence 81, and only what comes "
        "later can change: undo the change, or set 2: amounts are counted again at each start"
    )


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"rank": 4, "alpha": 8.0}, {"rank": 8, "alpha": 8.0}, "lora.rank was 4, is 8"),
        ({"rank": 4, "alpha": 8.0}, {"rank": 4, "alpha": 9.0}, "lora.alpha was 8.0, is 9.0"),
        ({"rank": 4}, None, "lora.rank was 4, is absent"),
        (None, {"rank": 4}, "lora.rank was absent, is 4"),
    ],
)
def test_adapters_do_not_change_within_a_run(before: Any, now: Any, said: str) -> None:
    """Also not with allow_changed: another rank would not load, and another alpha scales what was trained."""

    def identity(lora: Any) -> dict[str, Any]:
        return {"model": {"name": "llama3"}, **({"lora": lora} if lora else {})}

    with pytest.raises(ConfigError, match=f"{said}. A run cannot change the layers, the rank and the alpha"):
        check_identity(identity(before), identity(now), ["lora"], Path("run"), num_sequences=8)
    assert check_identity(identity(before), identity(now), ["lora"], Path("run")) != []  # nothing is trained


def test_a_run_of_adapters_is_no_model_to_start_from() -> None:
    before, now = ({"lora": {"rank": 4}, "loss": {"z_loss": z}} for z in (0.0, 0.1))
    with pytest.raises(ConfigError) as caught:
        check_identity(before, now, [], Path("run"), num_sequences=8)
    assert "initial_load_path" not in str(caught.value)
    del before["lora"], now["lora"]
    with pytest.raises(ConfigError, match=r"--checkpoint\.initial_load_path=run"):
        check_identity(before, now, [], Path("run"), num_sequences=8)
