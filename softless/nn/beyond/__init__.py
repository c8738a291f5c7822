"""Layers that are not attention: reversible, elimination, funnel, strided."""
