"""Fused Triton kernels: linear attention at the cost of its bytes. The only place that imports triton."""
