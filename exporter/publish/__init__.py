"""Staging -> immutable version or delta: manifest, locks, retention, and reading what is published."""
