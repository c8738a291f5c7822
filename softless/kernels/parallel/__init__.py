"""Kernels for non-causal attention."""
