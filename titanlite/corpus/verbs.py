"""The verbs that make and inspect corpora and tokenizers. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.commands import Verb
from titanlite.config import reference
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_arguments, split_words
from titanlite.options import take_flag, take_numbers
from titanlite.tools.verbs import shown_config


def _prepare_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    words, overrides = split_words(take_flag(argv, ALLOW_IMPORTS)[1])
    return (words[0] if words and words[0].endswith(".toml") else None), overrides


def _data_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    own = {"show": ["sequence", "num_sequences"], "plan": ["ranks"]}.get(argv[0])
    rest = take_flag(take_flag(argv[1:], ALLOW_IMPORTS)[1], "--json")[1]
    path, overrides = split_arguments(rest)
    config = shown_config(path) if own is not None and path is not None else None
    if own is None or config is None:
        return None
    return config, take_numbers(overrides, own)[1]


def _tokenizer_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    named = argv[0] == "show" and words and words[0].endswith(".toml")
    return (words[0], overrides) if named else None


VERBS = {
    "prepare": Verb(
        "titanlite.corpus.prepare",
        "make a dataset of token shards from text",
        table="prepare",
        schema=("titanlite.corpus.prepare", "Prepare"),
        config_of=_prepare_config,
        reference=reference.PREPARE_HEAD,
    ),
    "data": Verb(
        "titanlite.corpus.show_data",
        "verify and show datasets, and plan what a run reads of them",
        table="job",
        config_of=_data_config,
        own=(
            "--sequence",
            "--num-sequences",
            "--seq-len",
            "--packing",
            "--cache-dir",
            "--ranks",
            "--json",
            ALLOW_IMPORTS,
        ),
    ),
    "tokenizer": Verb(
        "titanlite.corpus.make_tokenizer",
        "train and show tokenizers",
        table="job",
        config_of=_tokenizer_config,
        own=(ALLOW_IMPORTS,),
    ),
}
