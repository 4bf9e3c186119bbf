"""The batch size that a training graph was traced with: found, and opened or told."""
