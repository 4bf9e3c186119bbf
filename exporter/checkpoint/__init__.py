"""Bytes to Catalog: one module a checkpoint family."""
