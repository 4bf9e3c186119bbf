"""Bytes and messages of TensorFlow and TF Serving, without importing either."""
