"""Weights: seeded, or read from a checkpoint; names and layouts of both."""
