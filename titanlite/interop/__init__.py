"""Reads and writes weights in titanlite's and Hugging Face's formats, and reads those that satellites add."""
