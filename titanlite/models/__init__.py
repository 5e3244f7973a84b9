"""Model families: nn.Modules with Hugging Face's parameter names, independent of ranks and jobs."""
