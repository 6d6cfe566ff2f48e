"""The discrete-event engine that runs plans, for proofs and for timelines."""
