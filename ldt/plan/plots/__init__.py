"""Draws plans and timelines as pictures, text and Chrome traces."""
