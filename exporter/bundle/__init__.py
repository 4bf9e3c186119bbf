"""Write the files of a SavedModel into a staging directory, from an InferenceGraph and a Mapping."""
