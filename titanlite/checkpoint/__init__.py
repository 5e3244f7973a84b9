"""Checkpoints that are whole or absent: what is saved, how it is committed, which one is resumed from."""
