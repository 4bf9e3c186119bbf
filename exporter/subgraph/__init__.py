"""The incremental subgraph: signatures by which a SavedModel applies deltas while it serves."""
