"""Checks and synchronizes the modules that a pipeline is given."""
