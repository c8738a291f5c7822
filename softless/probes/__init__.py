"""Instruments: what a mechanism costs, how far it is from softmax, which queries it confuses.

Every probe takes tensors (or shapes) and a mechanism, and returns a frozen dataclass of plain numbers.
"""
