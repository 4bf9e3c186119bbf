"""Verify a bundle's files, bytes and answers; and everything that is published for a model."""
