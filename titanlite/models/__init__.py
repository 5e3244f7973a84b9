"""Model families: pure modules under Hugging Face's parameter names. Knows nothing of ranks or jobs."""
