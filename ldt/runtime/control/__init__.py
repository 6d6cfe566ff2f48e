"""Exchanges small control messages between all ranks of a mesh, apart from payloads."""
