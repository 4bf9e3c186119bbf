"""The incremental subgraph: the signatures by which a SavedModel applies deltas while it serves."""
