"""Tokenizers: the contract, and tiktoken's, Hugging Face's and raw bytes."""
