"""The incremental subgraph: what makes a SavedModel take deltas while it serves."""
