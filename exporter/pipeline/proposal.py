"""Propose a first export of a checkpoint: its graph, and inputs named after the variables they look up.

A proposal is planned before it is made. If the plan is refused and the error names an option that is safe to
add, it is added and planned again; any other refusal gives the beginning of a builder.

A checkpoint without a graph gives one, too. It has the form in which the checkpoint's trainer makes models:
variables by name, a Keras model, or a `tf.Module`. What the checkpoint does not tell is left open, in the
last statement.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from keyword import iskeyword
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, ExtraKind, TensorRef
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.families import model_beside
from exporter.checkpoint.locate import last_written
from exporter.checkpoint.object_graph import ObjectGraph, read_object_graph
from exporter.errors import CheckpointError, ExportError
from exporter.graph.feeds import hands_over_batches
from exporter.graph.metagraph import fed_variables, input_placeholders, likely_outputs, read_metagraph
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    all_before,
    attr_dtype,
    attr_shape,
    data_inputs,
    endpoint,
)
from exporter.mapping.extras import classify_extras
from exporter.options import ExportRequest
from exporter.pipeline.inspected import ProposedInput
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import DType


class Proposal(Struct, frozen=True):
    """The options of a first export; `builder` is the text of a file to begin with if no graph is served.

    A graph with signatures of its own needs no inputs and outputs. `options` are others, in the form in which
    they are typed. `refused` is the reason why the graph beside the checkpoint is not served; None if it is.
    `archive` is the `.keras` archive beside the checkpoint that was written last; None if there is none.
    """

    catalog: Catalog
    model: str | None
    inputs: tuple[ProposedInput, ...] = ()
    outputs: Mapping[str, str] = {}
    signatures: tuple[str, ...] = ()
    builder: str = ""
    options: tuple[tuple[str, str], ...] = ()
    refused: ExportError | None = None
    archive: Path | None = None

    def command(self, ckpt_dir: Path, out: Path, builder: Path | None = None) -> str:
        """Return the command line of the export of `ckpt_dir` to the model `out`, quoted for a shell.

        `builder` is the file to which the builder was written; None: `model.py`.
        """
        words = ["export-model", "--ckpt-dir", quoted(ckpt_dir), "--out", quoted(out)]
        if self.model is None:  # otherwise exports find the graph beside this checkpoint, and beside the next
            words += ["--model", quoted(f"{builder or 'model.py'}:serving")]
        for one in self.inputs:
            words += ["--input", quoted(f"{one.name}={one.tensor}")]
        for name, tensor in self.outputs.items():
            words += ["--output", quoted(f"{name}={tensor}")]
        for option, value in self.options:
            words += [option, quoted(value)]
        return " ".join(words)

    def request(self, ckpt_dir: Path, out: Path) -> ExportRequest:
        """Return the proposed export of `ckpt_dir` to `out` as a request without a model.

        Exports find the graph themselves.

        If the proposal is a builder, the request does not name it.
        """
        given = {name: [value for option, value in self.options if option == name] for name in _OFFERED}
        return ExportRequest(
            ckpt_dir,
            out,
            inputs={one.name: one.tensor for one in self.inputs},
            outputs=self.outputs,
            feeds=dict(text.rpartition("=")[::2] for text in given["--feed"]),
            allow=tuple(given["--allow"]),
        )


# Options that a refused plan may add: they change how the graph is read, and neither run nor write anything.
_OFFERED = ("--feed", "--allow")
# as hints of errors name options, quoted for a shell
_OFFER = re.compile(r"(--feed|--allow(?= '?files=)) ('[^']*'|[^\s;]+)")
_MOST_TRIES = 8


def propose(ckpt_dir: Path) -> Proposal:
    """Read the newest checkpoint and the graph beside it, and propose an export of them.

    The proposal was planned, in a temporary directory, unless it is a builder to be completed; `refused` is
    why the graph is not served.

    Raises:
        CheckpointError: there is none, or it or the graph beside it is damaged.
        UsageError: the graph cannot be opened.
        GraphError: the graph is damaged: two of its nodes have one name, or a dtype is unknown.
        OSError: the checkpoint's directory cannot be listed.
    """
    catalog = open_checkpoint(ckpt_dir)
    model = model_beside(catalog.prefix)
    if model is None:
        archives = [*catalog.prefix.parent.glob("[!.]*.keras")]
        archive = last_written(archives) if archives else None
        return Proposal(catalog, None, builder=_builder_draft(catalog), archive=archive)
    return _planned(_from_graph(catalog, model), ckpt_dir)


def _from_graph(catalog: Catalog, model: str) -> Proposal:
    """Return a proposal to serve the graph `model` beside a checkpoint; its inputs and outputs are guesses.

    Raises CorruptFile or GraphError if the graph is damaged, UsageError if it cannot be opened, LfsPointer if
    it is a Git LFS pointer.
    """
    if not model.endswith(".meta"):
        return Proposal(catalog, model)
    meta_graph = read_metagraph(Path(model))
    if meta_graph.signature_def:
        return Proposal(catalog, model, signatures=tuple(sorted(meta_graph.signature_def)))
    index = GraphIndex.of(meta_graph)
    answers = likely_outputs(index)[:1]
    outputs = {_last(answer.node): str(answer) for answer in answers}
    inputs = [one for one in _inputs(index, answers) if not _has_default(index, one)]
    found = Proposal(catalog, model, tuple(inputs), outputs)
    return _with_options(found, [("--feed", f"{name}=false") for name in _switches(index, answers)])


def _has_default(index: GraphIndex, one: ProposedInput) -> bool:
    """True if an input is a scalar with a default, such as a dropout rate: requests need not give it."""
    node = index.nodes[endpoint(one.tensor).node]
    return node.op == "PlaceholderWithDefault" and attr_shape(node) == ()


def _switches(index: GraphIndex, answers: list[Endpoint]) -> Iterator[str]:
    """Yield the names of scalar boolean placeholders from which `answers` are computed: switches of training.

    GraphError if a placeholder has an unknown dtype.
    """
    needed = all_before(index.nodes, answers)
    for node in (index.nodes[name] for name in needed):
        is_switch = node.op.startswith("Placeholder") and attr_dtype(node, "dtype") is DType.BOOL
        if is_switch and attr_shape(node) == ():
            yield node.name


def _with_options(found: Proposal, options: list[tuple[str, str]]) -> Proposal:
    """Return the proposal with more options (pairs of option and value), without inputs that these feed."""
    fixed = {value.rpartition("=")[0] for option, value in options if option == "--feed"}
    inputs = tuple(one for one in found.inputs if endpoint(one.tensor).node not in fixed)
    return replace(found, inputs=inputs, options=(*found.options, *options))


def _planned(found: Proposal, ckpt_dir: Path) -> Proposal:
    """Plan the proposal, and return it with the options that a plan's errors ask for, or a builder instead.

    `ckpt_dir` is the checkpoint's directory. At most eight plans are made, each with the options for which
    the previous plan's error asks; nothing is kept of them. A builder is returned if that does not help: the
    last error is its `refused`. Raises CheckpointError or OSError of a plan at once.
    """
    from exporter.pipeline.full_plan import plan  # late: a checkpoint alone needs none of it

    for _ in range(_MOST_TRIES):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                plan(found.request(ckpt_dir, Path(scratch) / "model"))
        except CheckpointError:
            raise
        except ExportError as error:
            refused = error
        else:
            return found
        offered = [(option, *shlex.split(value)) for option, value in _OFFER.findall(refused.hint)]
        new = [(option, value) for option, value, *_ in offered if (option, value) not in found.options]
        if not new:
            break
        found = _with_options(found, new)
    return Proposal(found.catalog, None, builder=_builder_draft(found.catalog), refused=refused)


def _inputs(index: GraphIndex, answers: list[Endpoint]) -> Iterator[ProposedInput]:
    """Yield the placeholders and tensors of input pipelines from which answers are computed, sorted.

    Each has a name for requests: the placeholder's; of a pipeline's tensor, the name of the only variable
    that it looks up, if no other tensor does, else `input_<n>`. Names are not made unique.
    """
    needed = all_before(index.nodes, answers)
    given = {node.name for node in input_placeholders(index)}
    given |= {name for name in needed if hands_over_batches(index.nodes[name].op)}
    taken = {source for name in needed if name not in given for source in data_inputs(index.nodes[name])}
    tensors = sorted(source for source in taken if source.node in given)
    feeds = fed_variables(index, tensors)
    used = Counter(feeds.values())
    for number, tensor in enumerate(tensors):
        if index.nodes[tensor.node].op.startswith("Placeholder"):
            name = _last(tensor.node)
        elif len(met := feeds[tensor]) == 1 and used[met] == 1:
            name = _last(met[0])
        else:
            name = f"input_{number}"
        yield ProposedInput(name, str(tensor), feeds[tensor])


def _last(name: str) -> str:
    return name.rpartition("/")[2]


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


def _builder_draft(catalog: Catalog) -> str:
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
    return ascii(name)[1:-1]  # a line break in a name would end the comment, and begin code


def _declared(tensors: Mapping[str, TensorRef]) -> Iterator[str]:
    for name, tensor in sorted(tensors.items()):
        of = f"{name!r}, {list(tensor.shape)}, tf.{tensor.dtype.label}"
        yield f"    {_identifier(name)} = tf.compat.v1.get_variable({of})"


def _identifier(name: str) -> str:
    """Return a Python name that resembles a variable's name; two variables may get the same."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"{found}_" if iskeyword(found) or found == "tf" else re.sub(r"^(?=[0-9])", "_", found)
