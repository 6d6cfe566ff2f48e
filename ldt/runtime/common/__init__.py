"""Types and helpers that every part of the runtime uses."""
