"""Deltas: what changed between two positions. Format, packing, comparing, merging."""
