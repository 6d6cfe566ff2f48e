"""Random jobs of a seed against the unsplit model: each ends equal or is refused by name, on every rank."""
