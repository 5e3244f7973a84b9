"""Mechanism of the configuration: components, strict TOML, reference text. Knows nothing of torch."""
