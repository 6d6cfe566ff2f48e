"""Prepares a call: microbatches, step message, plan, shapes of hops, handshake."""
