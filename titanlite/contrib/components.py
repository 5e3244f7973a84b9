"""The formats of weights that contrib/ adds, for `titanlite import` and checkpoint.initial_load_path, and the
tokenizer `sentencepiece`."""

from __future__ import annotations

import titanlite.contrib.sentencepiece  # noqa: F401
from titanlite.contrib.meta_weights import is_meta, open_meta, open_torchtitan
from titanlite.contrib.nanochat import is_nanochat, open_nanochat, write_nanochat
from titanlite.interop.dcp import is_foreign_dcp
from titanlite.interop.formats import FORMATS, WRITERS, Format

FORMATS += [
    Format(is_meta, open_meta),
    Format(is_foreign_dcp, open_torchtitan),
    Format(is_nanochat, open_nanochat),
]
WRITERS["nanochat"] = write_nanochat
