"""A run on a stream, on CUDA: it resumes to the bit, and its loader never waits for the device, even where a
micro-batch is changed after it was pinned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.line_stream import LineStream
from tests.support.gpu import run
from tests.support.streams import stream_loader, values
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.data.stream_source import Stream

pytestmark = pytest.mark.gpu
KEYS = ("train/loss", "train/grad_norm", "data/batch_sha")


def lines(folder: Path) -> Path:
    (folder / "lines.txt").write_text("".join(f"line {i} {'x' * (i % 37)}\n" for i in range(600)))
    return folder / "lines.txt"


@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_bit_identically(tmp_path: Path, corpus: Path, workers: int) -> None:
    keys = [
        "--job.imports=['tests.examples.line_stream']",
        f"--data.sources=[{{ name = 'stream', stream = {{ name = 'lines', path = '{lines(tmp_path)}' }} }}]",
        "--data.holdout_sequences=0",
        f"--data.num_workers={workers}",
    ]
    whole = run(tmp_path, corpus, *keys, "--training.steps=9", name="whole")
    for steps in (4, 6, 9):
        parts = run(tmp_path, corpus, *keys, f"--training.steps={steps}", name="parts")
    rows = [[[row[key] for key in KEYS] for row in metrics] for metrics in (whole, parts)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 9


def test_the_loader_never_waits_for_the_device(tmp_path: Path) -> None:
    source = Stream(stream=LineStream(path=str(lines(tmp_path))))
    sizes = StepSizes([StepSize(0, 8), StepSize(16, 8, 2)])  # the second size splits sequences
    expected = stream_loader(source, 1, 2, masked=True, sizes=sizes)
    loader = stream_loader(source, 1, 2, masked=True, sizes=sizes, pin_memory=True)
    steps = [loader.next_step(torch.device("cuda"))[1]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps += [loader.next_step(torch.device("cuda"))[1] for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        loader.close()
    assert [values(step) for step in steps] == [
        values(expected.next_step(torch.device("cpu"))[1]) for _ in steps
    ]
    expected.close()
