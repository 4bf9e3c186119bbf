"""The terminal, for both commands: parameters, what is printed, errors and exit codes, completion."""
