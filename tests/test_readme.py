"""The README quotes the log in benchmarks/results/; tests/test_end_to_end.py compares it with the program."""

from __future__ import annotations

from benchmarks.readme_log import LOG, quoted_lines, shape


def test_the_log_that_is_quoted_is_the_one_that_was_recorded() -> None:
    recorded = iter(LOG.read_text(encoding="utf-8").splitlines())
    quoted = quoted_lines()
    assert len(quoted) > 15
    for line in quoted:  # in order
        assert line in recorded, line


def test_a_shape_keeps_words_and_drops_numbers() -> None:
    line = "[rank0] 19:12:39 step  10/160  loss 7.6037  3,178 tok/s  waiting for data 2%  eta 0:01:37"
    assert shape(line) == "[rankN] N step N/N loss N N tok/s eta N"
    assert shape(line.replace("eta", "left")) != shape(line)
