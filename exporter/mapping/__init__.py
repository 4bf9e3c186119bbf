"""Map an InferenceGraph's variables to a Catalog's tensors: by names, objects, rules and row orders."""
