"""Operators of draft-tree speculative decoding, a module each; their specifications are in `reference/`."""
