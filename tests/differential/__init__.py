"""Compares random jobs with the unsplit model: each must be equal, or refused with a known error, on every rank."""
