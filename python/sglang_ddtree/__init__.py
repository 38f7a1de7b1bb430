"""DDTree speculative decoding for SGLang: see docs/architecture.md for the map."""

__version__ = "0.1.0"
