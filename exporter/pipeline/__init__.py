"""Run the stages in order: full exports, deltas, and work on published logs."""
