"""Propose a first export of a checkpoint: its graph, and inputs that are named by what they are used with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from keyword import iskeyword
from pathlib import Path

from msgspec import Struct

from exporter.catalog import Catalog, ExtraKind, Naming
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.families import model_beside
from exporter.graph.feeds import hands_over_batches
from exporter.graph.metagraph import fed_variables, input_placeholders, likely_outputs, read_metagraph
from exporter.graph.nodes import Endpoint, GraphIndex, all_before, data_inputs
from exporter.mapping.extras import classify_extras
from exporter.pipeline.inspected import ProposedInput
from exporter.storage.local_paths import quoted


class Proposal(Struct, frozen=True):
    """The options of a first export; `builder` is the text of a file to begin with where there is no graph.

    A graph with signatures of its own needs no inputs and outputs.
    """

    catalog: Catalog
    model: str | None
    inputs: tuple[ProposedInput, ...] = ()
    outputs: Mapping[str, str] = {}
    signatures: tuple[str, ...] = ()
    builder: str = ""

    def command(self, ckpt_dir: Path, out: Path, builder: Path | None = None) -> str:
        """The command line of the export; `builder` is the file that the builder was written to."""
        words = ["export-model", "--ckpt-dir", quoted(ckpt_dir), "--out", quoted(out)]
        if self.model is None:  # an export finds a graph that lies beside the checkpoint, and the next one's
            words += ["--model", quoted(f"{builder or 'model.py'}:serving")]
        for one in self.inputs:
            words += ["--input", quoted(f"{one.name}={one.tensor}")]
        for name, tensor in self.outputs.items():
            words += ["--output", quoted(f"{name}={tensor}")]
        return " ".join(words)


def propose(ckpt_dir: Path) -> Proposal:
    """Read the newest checkpoint and the graph beside it, and propose how to serve them.

    Raises:
        CheckpointError: there is none, or it is damaged.
        GraphError: the graph beside it is damaged.
    """
    catalog = open_checkpoint(ckpt_dir)
    model = model_beside(catalog.prefix)
    if model is None:
        return Proposal(catalog, None, builder="\n".join(_builder(catalog)) + "\n")
    if not model.endswith(".meta"):
        return Proposal(catalog, model)
    meta_graph = read_metagraph(Path(model))
    if meta_graph.signature_def:
        return Proposal(catalog, model, signatures=tuple(sorted(meta_graph.signature_def)))
    index = GraphIndex.of(meta_graph)
    answers = likely_outputs(index)[:1]
    outputs = {_last(answer.node): str(answer) for answer in answers}
    return Proposal(catalog, model, tuple(_inputs(index, answers)), outputs)


def _inputs(index: GraphIndex, answers: list[Endpoint]) -> Iterator[ProposedInput]:
    """The placeholders, and the tensors of input pipelines, that answers are computed from."""
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


def _builder(catalog: Catalog) -> Iterator[str]:
    """The lines of a builder that declares the checkpoint's own variables."""
    yield "def serving():"
    if catalog.naming is not Naming.NAMES:
        yield "    # Build the Keras model that was trained, as its training program does, and return it."
        yield "    raise NotImplementedError"
        return
    yield "    import tensorflow as tf"
    yield ""
    extras = {extra.tensor.name for extra in classify_extras(catalog) if extra.kind is not ExtraKind.OTHER}
    for name, tensor in sorted(catalog.tensors.items()):
        if name not in extras:
            yield (
                f"    {_identifier(name)} = tf.compat.v1.get_variable({name!r}, {list(tensor.shape)}, "
                f"tf.{tensor.dtype.label})"
            )
    yield "    # Declare what requests hold, compute the answer, and return both by name:"
    yield "    raise NotImplementedError  # return {'ids': ids}, {'scores': scores}"


def _identifier(name: str) -> str:
    """A name of Python that looks like a variable's."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"{found}_" if iskeyword(found) or found == "tf" else re.sub(r"^(?=[0-9])", "_", found)
