"""Tokenizers: tiktoken, Hugging Face, bytes."""
