"""The embedded model server and the client side of TensorFlow Serving's protocol."""
