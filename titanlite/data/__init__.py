"""The data that training reads: token shards, sources, packing, the data order, the loader."""
