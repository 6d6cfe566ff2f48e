"""Proves a plan before a process starts: rows, lanes, deadlocks."""
