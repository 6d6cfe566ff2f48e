"""Layerwise disaggregated training on PyTorch."""
