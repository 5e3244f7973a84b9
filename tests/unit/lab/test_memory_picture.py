"""The picture of memory over a step: its areas are the numbers of the plan."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.lab.memory import GIB, KINDS, Moment
from titanlite.lab.memory_picture import BOTTOM, HEIGHT, TOP, memory_svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
CARD_GIB = 8.0


def edges(svg: str) -> dict[str, tuple[list[float], list[float]]]:
    """By kind, the lower and the upper edge of each column, in GiB."""
    gib_per_pixel = CARD_GIB * 1.04 / (HEIGHT - TOP - BOTTOM)
    by_kind = {}
    for polygon in ET.fromstring(svg).iter(f"{NAMESPACE}polygon"):
        points = [float(word.partition(",")[2]) for word in polygon.attrib["points"].split()]
        upper, lower = points[: len(points) // 2 : 2], points[: len(points) // 2 - 1 : -2]
        gib = [[(HEIGHT - BOTTOM - y) * gib_per_pixel for y in ys] for ys in (lower, upper)]
        by_kind[polygon.attrib["id"]] = gib[0], gib[1]
    return by_kind


def test_areas_are_stacked_in_the_sizes_of_the_moments() -> None:
    sizes = [[1, 0, 2, 0.5, 0, 0, 0.25], [1, 0.5, 2, 1.5, 1, 0.25, 0.25], [1, 1, 2, 0, 0, 0, 0]]
    names = ("forward", "loss", "optimizer step")
    moments = [Moment(name, dict(zip(KINDS, [x * GIB for x in row]))) for name, row in zip(names, sizes)]
    svg = memory_svg(moments, CARD_GIB, "a <b> & c")
    drawn = edges(svg)
    for i, kind in enumerate(KINDS):
        for edge, num in zip(drawn[kind], (i, i + 1)):
            assert edge == pytest.approx([sum(row[:num]) for row in sizes], abs=0.001)
    texts = [text.text for text in ET.fromstring(svg).iter(f"{NAMESPACE}text")]
    assert {"a <b> & c", "GiB at the peak: 6.50", "peak: loss", "activations 1.50", "GPU 8.0"} <= set(texts)


def test_plan_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.svg"
    words = ["plan", "debug", "--gpus=1xH100", f"--svg={file}"]
    assert cli.run([*words, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    texts = {text.text for text in ET.fromstring(file.read_text()).iter(f"{NAMESPACE}text")}
    assert f"GiB at the peak: {memory['peak_allocated_gib']:.2f}" in texts
    assert {f"{kind} {memory[f'{kind}_gib']:.2f}" for kind in KINDS} <= texts
    assert f"peak: {memory['peak_at']}" in texts
    assert cli.run(["plan", "debug", f"--svg={tmp_path}/missing/memory.svg"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
