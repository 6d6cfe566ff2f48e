"""Searches for the order of actions that fits the costs, the links and the memory."""
