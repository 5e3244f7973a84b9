"""The transforms that shard, compile and initialise a model, one file per transform. No transform renames a
parameter."""
