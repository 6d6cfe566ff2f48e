"""Runs a chunk on fake tensors to learn its output shapes and which gradients flow."""
