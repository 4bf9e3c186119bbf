"""Deltas, the changes between two positions: format, packing, comparing, merging."""
