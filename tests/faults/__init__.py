"""Seeded faults in a small job: what the other ranks raise, how soon, and what is left behind."""
