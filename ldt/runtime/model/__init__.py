"""What a pipeline checks of the modules that it is given: state, ties, initial weights, buffers, keywords."""
