"""Searches for the order that fits costs, link and memory."""
