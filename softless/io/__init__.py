"""Every untrusted byte enters here: `load_weights` reads a file's tensors and executes nothing in it."""

from softless.io.weights import WeightsReport, load_weights

__all__ = ["WeightsReport", "load_weights"]
