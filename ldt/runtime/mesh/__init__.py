"""Connects the ranks of a topology into a mesh."""
