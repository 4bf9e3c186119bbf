"""The batch size that a training graph was traced with: found, and made dynamic or declared."""
