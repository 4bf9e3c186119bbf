"""Page faults of a plain model's calls, before and after a base is loaded and updated beside it.

`python -m tests.support.neighbour VERSION` prints both, a count each: in a process of its own, because what a
kernel asks of the C library's allocator lasts as long as the process.
"""

from __future__ import annotations

import json
import resource
import sys

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

CALLS = 300
IDS, DIM = 1_000, 64
"""256 KB a tensor: twice as much as glibc maps anew at each allocation, as long as nobody frees any."""


def main(version: str) -> None:
    """Print the page faults of so many calls, before and after."""
    with tf.Graph().as_default():
        ids = tf1.placeholder(tf.int64, [None])
        table = tf1.get_variable(
            "table", [10_000, DIM], use_resource=True, initializer=tf1.zeros_initializer()
        )
        total = tf.reduce_sum(tf.gather(table, ids) + 1.0, 1)
        plain = tf1.Session()
        plain.run(table.initializer)
    call = plain.make_callable(total, [ids])
    asked = np.arange(IDS)

    def faults() -> int:
        for _ in range(CALLS):
            call(asked)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(CALLS):
            call(asked)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    alone = faults()
    base = tf1.Session(graph=tf.Graph())
    signatures = tf1.saved_model.load(base, ["serve"], version).signature_def
    update = signatures["incremental_update"]
    done = base.run(
        {name: info.name for name, info in update.outputs.items()}, {update.inputs["up_to"].name: [-1]}
    )
    print(json.dumps([alone, faults(), int(done["deltas"][0])]))


if __name__ == "__main__":
    main(sys.argv[1])
