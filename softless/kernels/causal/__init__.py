"""Kernels for causal attention."""
