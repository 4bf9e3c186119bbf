"""The order of the stages: full exports, increments, and the tools of a log. Nothing else knows the order."""
