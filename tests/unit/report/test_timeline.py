"""The table of lost time has every pause."""

from __future__ import annotations

import re

from tests.support.jobs import ROOT
from titanlite.report.timeline import PAUSES


def test_every_pause_that_a_run_measures_is_lost_time() -> None:
    files = ["titanlite/run.py", *(ROOT / "titanlite/metrics").glob("*.py")]
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r'untimed(?:\(|, )"([\w/]+)"', code)) == set(PAUSES.values())
