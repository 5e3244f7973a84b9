"""From text to training rows: tokenizers, shards, sources, the order of rows, packing, the loader."""
