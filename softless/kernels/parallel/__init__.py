"""Kernels for attention without a causal order."""
