"""Kernels for exact softmax over near tokens and linear attention over far ones."""
