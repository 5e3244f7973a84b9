"""Configurations and checkpoints of other trainers, and files of benchmarks."""
