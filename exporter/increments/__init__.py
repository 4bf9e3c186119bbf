"""What trainers write between full checkpoints, and what to publish next because of it."""
