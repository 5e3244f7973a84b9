"""Attention kernels behind one interface."""
