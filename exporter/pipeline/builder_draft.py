"""Draft a builder, the function that makes the graph to serve, for a checkpoint without a graph.

The draft has the form in which the checkpoint's trainer makes models: variables by name, a Keras model, or a
`tf.Module`. What the checkpoint does not tell is left open, in the last statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from keyword import iskeyword

from msgspec.structs import replace

from exporter.catalog import Catalog, ExtraKind, TensorRef
from exporter.checkpoint.object_graph import ObjectGraph, read_object_graph
from exporter.mapping.extras import classify_extras

_OPEN = "    raise NotImplementedError('complete this function as its comments say')"
_VARIABLES = """\
    # Declare what requests hold, compute the answer, and return both by name:
    raise NotImplementedError  # return {'ids': ids}, {'scores': scores}
"""
_KERAS = """\
    # TODO: make the model that was trained, its layers in the same order and of the same names, and return
    # it. If a function of the training program does so, name that: --model train.py:FUNCTION. As in:
    #   ids = keras.Input([3], dtype="int64", name="ids")
    #   rows = keras.layers.Embedding(1000, 8, name="table")(ids)
    #   scores = keras.layers.Dense(1, name="scores")(keras.layers.Flatten()(rows))
    #   return keras.Model(ids, scores)
    # A model of a class of your own has to be called once, to know its inputs:
    #   model = MyModel()
    #   model(keras.Input([3], dtype="int64", name="ids"))
    #   return model
    # Several models, each a signature: return {"user_tower": user_tower, "item_tower": item_tower}
"""
_MODULE = """\
    # TODO: make the objects that were trained, with attributes of the same names, as a tf.Module with
    # signatures, and return it. As in:
    #   class Model(tf.Module):
    #       def __init__(self):
    #           super().__init__()
    #           self.table = tf.Variable(tf.zeros([1000, 8]))
    #           self.signatures = {"serving_default": self.serve}
    #
    #       @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
    #       def serve(self, ids):
    #           return {"rows": tf.gather(self.table, ids)}
    #
    #   return Model()
"""


def builder_draft(catalog: Catalog) -> str:
    """Return a draft of a builder for a checkpoint: the text of a Python file with a function `serving`.

    Until it is completed as its comments say, the function raises NotImplementedError. Raises CheckpointError
    and subclasses if the checkpoint's object graph is damaged or cannot be read.
    """
    objects = read_object_graph(catalog)
    extras = {extra.tensor.name for extra in classify_extras(catalog) if extra.kind is not ExtraKind.OTHER}
    tensors = {name: tensor for name, tensor in catalog.tensors.items() if name not in extras}
    if "Keras" in catalog.family:
        is_keras_2 = "Keras 2" in catalog.family or "legacy" in catalog.family
        needed = "tf_keras as keras  # Keras 2: pip install tf-keras" if is_keras_2 else "keras"
        lines, end = _shown(catalog, objects, tensors), f"{_KERAS}{_OPEN}\n"
    elif objects is not None:
        needed, lines, end = "tensorflow as tf", _shown(catalog, objects, tensors), f"{_MODULE}{_OPEN}\n"
    else:
        needed, lines, end = "tensorflow as tf", _declared(tensors), _VARIABLES
    return "\n".join(("def serving():", f"    import {needed}", "", *lines, end))


def _shown(catalog: Catalog, objects: ObjectGraph | None, tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    """Yield comment lines that list a checkpoint's variables: name or path of objects, dtype and shape.

    `tensors` has the variables' tensors, by name. With `objects`, a variable is listed by its path from the
    root object, in that order, and variables without a path are left out; None: by its tensor's name.
    """
    yield f"    # Variables of the checkpoint ({catalog.family}):"
    if objects is None:
        yield from (_line(name, tensor) for name, tensor in tensors.items())
        return
    # A Keras optimizer refers to the model's variables, too, often by a shorter path.
    kept = [
        replace(item, children={}) if number in objects.optimizers else item
        for number, item in enumerate(objects.objects)
    ]
    for number, place in ObjectGraph(tuple(kept)).paths.items():
        variable = kept[number].variable
        if variable is not None and variable.tensor in tensors:
            yield f"{_line(place, tensors[variable.tensor])}  ({_printable(variable.name)})"


def _line(place: str, tensor: TensorRef) -> str:
    return f"    #   {_printable(place)}: {tensor.dtype.label}{list(tensor.shape)}"


def _printable(name: str) -> str:
    return ascii(name)[1:-1]


def _declared(tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    for name, tensor in sorted(tensors.items()):
        of = f"{name!r}, {list(tensor.shape)}, tf.{tensor.dtype.label}"
        yield f"    {_identifier(name)} = tf.compat.v1.get_variable({of})"


def _identifier(name: str) -> str:
    """Return a Python name that resembles a variable's name; two variables may get the same."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"{found}_" if iskeyword(found) or found == "tf" else re.sub(r"^(?=[0-9])", "_", found)
