"""The formats of weights that contrib/ adds, for `titanlite import` and checkpoint.initial_load_path, and the
tokenizer `sentencepiece`."""

from __future__ import annotations

import titanlite.contrib.sentencepiece  # noqa: F401
from titanlite.contrib.meta_weights import is_meta, open_meta, open_torchtitan
from titanlite.interop.dcp import is_foreign_dcp
from titanlite.interop.formats import FORMATS, Format

FORMATS += [Format(is_meta, open_meta), Format(is_foreign_dcp, open_torchtitan)]
