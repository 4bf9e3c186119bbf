"""Write the files of a SavedModel into a staging directory, given an InferenceGraph and a VariableMapping."""
