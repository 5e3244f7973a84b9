"""Configurations and checkpoints of other trainers."""
