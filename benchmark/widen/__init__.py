"""The demo pair at the width, depth and vocabulary of a real model, computing what the small pair computes.

A wide model built from a small one gives a benchmark both at once: acceptance of a trained pair, and the cost of a
step at the wide shape. `rules` holds the mathematics, `target` and `draft` apply it to every tensor of a checkpoint,
`loader` lets SGLang fill its parameters from there without a file of weights, `verify` proves it layer by layer.
"""
