"""Runs a chunk on fake tensors, unseen by anything else: shapes, and which gradients flow."""
