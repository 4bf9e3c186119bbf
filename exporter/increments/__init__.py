"""Read what trainers write between full checkpoints, and plan what to publish next."""
