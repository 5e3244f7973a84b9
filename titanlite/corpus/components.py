"""Registers the components of this package that a training job may name."""

import titanlite.corpus.chat_source
import titanlite.corpus.hub_stream
import titanlite.corpus.megatron  # noqa: F401
