"""A small convolutional digit classifier, written as a TF1 graph for parameter servers.

`export-model --model examples/digits/model.py:serving` names the builder at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

PARTS = 2
"""Slices that the largest weight is kept in: one on each parameter server."""

_DROPOUT = 0.3
_STATISTICS_DECAY = 0.97

Getter = Callable[..., Any]
Signature = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Inference:
    """What the network makes of n images: `features` float32 [n, 128]; `logits` and `scores` [n, 10]."""

    features: Any
    logits: Any

    @property
    def scores(self) -> Any:
        """Probability of each digit."""
        return tf.nn.softmax(self.logits, name="scores")


def inference(images: Any, training: bool, *, parts: int = PARTS, getter: Getter | None = None) -> Inference:
    """The forward pass over `images` float32 [n, 8, 8].

    With `training`, dropout is on, and batch norm uses the batch's statistics and adds its updates of the
    moving ones to the collection UPDATE_OPS. A custom `getter` may put other values, such as moving
    averages, in place of the weights.
    """
    with tf.compat.v1.variable_scope("digits", reuse=tf.compat.v1.AUTO_REUSE, custom_getter=getter):
        net = images[..., tf.newaxis]
        net = tf.nn.relu(_batch_norm(_convolution(net, 32, "conv1"), training, "norm1"))
        net = tf.nn.relu(_batch_norm(_convolution(net, 64, "conv2"), training, "norm2"))
        net = tf.nn.max_pool2d(net, ksize=2, strides=2, padding="VALID")
        net = tf.reshape(net, [-1, 4 * 4 * 64])
        features = tf.nn.relu(_dense(net, 128, "hidden", parts=parts))
        kept = tf.nn.dropout(features, rate=_DROPOUT) if training else features
        return Inference(features, _dense(kept, 10, "logits"))


def serving(parts: int | str = PARTS) -> dict[str, Signature]:
    """The signatures to serve, over the inference form of the network."""
    images = tf.compat.v1.placeholder(tf.float32, [None, 8, 8], name="images")
    network = inference(images, training=False, parts=int(parts))
    scores = network.scores
    return {
        "serving_default": ({"images": images}, {"scores": scores, "digits": tf.argmax(scores, axis=1)}),
        "features": ({"images": images}, {"features": network.features}),
    }


def _convolution(net: Any, channels: int, name: str) -> Any:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [3, 3, net.shape[-1], channels])
        return tf.nn.conv2d(net, kernel, strides=1, padding="SAME")


def _dense(net: Any, units: int, name: str, *, parts: int = 1) -> Any:
    partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [net.shape[-1], units], partitioner=partitioner)
        bias = tf.compat.v1.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.matmul(net, kernel) + bias


def _batch_norm(net: Any, training: bool, name: str) -> Any:
    """`tf.compat.v1.layers.batch_normalization`, which does not work beside Keras 3, in its own ops."""
    shape = [net.shape[-1]]
    zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
    with tf.compat.v1.variable_scope(name):
        beta = tf.compat.v1.get_variable("beta", shape, initializer=zeros)
        gamma = tf.compat.v1.get_variable("gamma", shape, initializer=ones)
        mean = tf.compat.v1.get_variable("moving_mean", shape, initializer=zeros, trainable=False)
        variance = tf.compat.v1.get_variable("moving_variance", shape, initializer=ones, trainable=False)
        if training:
            moments = tf.nn.moments(net, axes=[0, 1, 2])
            for moving, of_batch in zip((mean, variance), moments, strict=True):
                update = tf.compat.v1.assign_sub(moving, (moving - of_batch) * (1 - _STATISTICS_DECAY))
                tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)
            mean, variance = moments
        return tf.nn.batch_normalization(net, mean, variance, beta, gamma, 1e-3)
