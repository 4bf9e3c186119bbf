"""Deltas: what changed between two positions, as a small tensor bundle."""
