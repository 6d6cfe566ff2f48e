"""Executes one row of a plan: forwards, backwards, the loss, gradient reduction."""
