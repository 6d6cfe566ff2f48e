"""Runs one row of a plan: chunks, forwards and backwards, the loss, gradient reduction, what is recorded."""
