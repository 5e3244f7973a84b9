"""Imports and exports weights in the formats of Hugging Face, torchtitan and Meta."""
