"""Run other people's code in a limited process, so that it can neither hang nor crash ours."""
