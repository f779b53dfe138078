"""Converting a model that exists: rank its layers, align and distil the swapped ones, train the whole."""
