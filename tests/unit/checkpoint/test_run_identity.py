"""Messages about run identities that differ."""

from __future__ import annotations

from pathlib import Path

from titanlite.checkpoint.run_identity import check_identity


def test_a_default_that_the_run_identity_leaves_out_is_named() -> None:
    with_z_loss = {"loss": {"name": "cross_entropy", "z_loss_multiplier": 1e-4}}
    without, none = {"loss": {"name": "cross_entropy"}}, {"loss": {}}
    for before, now, text in [
        (with_z_loss, without, "loss.z_loss_multiplier was 0.0001, is 0.0"),
        (without, with_z_loss, "loss.z_loss_multiplier was 0.0, is 0.0001"),
        (without, none, 'loss.name was "cross_entropy", is absent'),
    ]:
        assert check_identity(before, now, ["loss"], Path()) == [text]
