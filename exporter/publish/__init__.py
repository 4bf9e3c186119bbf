"""Publish versions and deltas (staging, commit, manifests, locks, retention), and read published models."""
