"""Weights of other formats: Hugging Face, torchtitan, Meta. Import, export, initial weights."""
