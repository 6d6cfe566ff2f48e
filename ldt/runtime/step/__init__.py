"""How a call begins: microbatches, its message, plans, shapes of hops, the handshake."""
