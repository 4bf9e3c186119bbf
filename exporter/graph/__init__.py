"""Make the inference graph, without values, from a builder, a MetaGraph or a SavedModel."""
