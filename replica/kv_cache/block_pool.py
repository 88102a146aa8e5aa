"""Who owns which block: the free queue, reference counts, the map from block key to blocks."""
