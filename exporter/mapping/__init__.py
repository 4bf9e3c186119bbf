"""InferenceGraph x Catalog -> Mapping: names, objects, rules, row orders; what is missing, what is left."""
