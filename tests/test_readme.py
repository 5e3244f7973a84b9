"""The README is short, and quotes the log in benchmarks/results/; test_end_to_end.py compares the log with
the program."""

from __future__ import annotations

from benchmarks.readme_log import BLOCK, LOG, README, excerpt, quoted_lines, shape


def test_the_readme_has_at_most_1000_words() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1000


def test_the_log_that_is_quoted_is_the_one_that_was_recorded() -> None:
    block = BLOCK.search(README.read_text(encoding="utf-8"))
    assert block is not None
    assert block[0] == excerpt(LOG.read_text(encoding="utf-8"))
    assert len(quoted_lines()) == 5


def test_a_shape_keeps_words_and_drops_numbers() -> None:
    line = "[rank0] 19:12:39 step  10/160  loss 7.6037  3,178 tok/s  waiting for data 2%  eta 0:01:37"
    assert shape(line) == "[rankN] N step N/N loss N N tok/s eta N"
    assert shape(line.replace("eta", "left")) != shape(line)
