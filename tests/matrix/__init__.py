"""Bases made, updated and served by every supported TensorFlow: see `__main__`."""
