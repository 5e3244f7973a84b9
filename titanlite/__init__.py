"""titanlite: a PyTorch-native, TOML-driven trainer for language models that resumes exactly."""

__version__ = "0.1.0"
