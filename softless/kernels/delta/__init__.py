"""Kernels for the delta rule."""
