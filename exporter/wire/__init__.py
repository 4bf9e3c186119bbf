"""Bytes and messages of TensorFlow and TensorFlow Serving, without importing either."""
