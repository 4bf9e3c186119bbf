"""Read the files that trainers write between full checkpoints, and plan the next publication."""
