"""The verb `prepare` of the command line. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.commands import Verb
from titanlite.config import reference
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_words
from titanlite.options import take_flag


def _prepare_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    words, overrides = split_words(take_flag(argv, ALLOW_IMPORTS)[1])
    return (words[0] if words and words[0].endswith(".toml") else None), overrides


VERBS = {
    "prepare": Verb(
        "titanlite.corpus.prepare",
        "make a dataset of token shards from text",
        table="prepare",
        schema=("titanlite.corpus.prepare", "Prepare"),
        config_of=_prepare_config,
        reference=reference.PREPARE_HEAD,
    )
}
