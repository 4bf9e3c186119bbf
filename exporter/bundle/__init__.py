"""A Mapping made into a SavedModel in a staging directory."""
