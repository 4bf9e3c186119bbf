"""From distributed TensorFlow checkpoints to TensorFlow Serving."""
