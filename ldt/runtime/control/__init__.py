"""Carries small messages between all ranks of a mesh, apart from payloads."""
