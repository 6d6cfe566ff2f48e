"""The mesh: connects the ranks of a topology and holds what they talk through."""
