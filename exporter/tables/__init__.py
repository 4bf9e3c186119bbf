"""Dynamic embedding tables: keys are any 64-bit integers, and stock TensorFlow Serving looks them up."""
