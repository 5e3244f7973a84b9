"""The configuration mechanism: components, strict TOML, reference text. Does not import torch."""
