"""The transforms that shard, compile and initialise a model, one file per transform. None renames a
parameter."""
