"""Moves payloads between nodes: process groups, endpoints of channels, transfer strategies, transports."""
