"""The command `serve-model`: a model server, and a client of any TensorFlow Serving."""
