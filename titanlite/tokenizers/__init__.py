"""Tokenizers: the interface, and implementations for tiktoken, Hugging Face and raw bytes."""
