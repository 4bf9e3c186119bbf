"""Carry what is published between a local model base path and an object store: push and pull."""
