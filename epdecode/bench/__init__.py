"""Benchmarks that measure the product's parts apart from the layer, each beside its floor."""
