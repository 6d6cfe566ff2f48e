"""Injects seeded faults into a small job, and checks what the other ranks raise, how soon, and what leaks."""
