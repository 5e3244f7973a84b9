"""The table of lost time has every pause."""

from __future__ import annotations

import re

from tests.support.jobs import ROOT
from titanlite.report.timeline import PAUSES


def test_every_pause_that_a_run_measures_is_lost_time() -> None:
    code = (ROOT / "titanlite/run.py").read_text(encoding="utf-8")
    measured = re.findall(r'untimed(?:\(|, )"([\w/]+)"', code)
    assert len(measured) == code.count("meter.untimed")
    assert set(measured) == set(PAUSES.values())
