"""Edit a GraphDef: add nodes, variables, and functions written in TensorFlow's Python.

A part is a Python function over tensors. It is traced in a graph of its own: neither the part nor the edited
graph is executed or imported as a whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.graph.functions import reachable
from exporter.graph.nodes import called, new_node, put_nodes
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import fill

CPU = "/device:CPU:0"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\\/>-]")


class GraphEditor(Struct):
    """Adds nodes, under a scope that the graph does not use, and functions to a GraphDef."""

    graph_def: Proto
    scope: str
    owner: str  # part of resources' names: TensorFlow 2's loader keeps those of all models in one place
    _spelled: dict[str, str] = field(default_factory=dict)  # {wanted name: its own valid name}

    @classmethod
    def onto(cls, graph_def: Proto, wanted: str, owner: str) -> GraphEditor:
        """Return an editor that adds nodes under `wanted`, or `wanted_<n>` if the graph has names there.

        A scope is taken if a node is in it, or the name of a function begins with it. `wanted` is to be in
        lower case, as names that differ in case alone count as one; `owner` becomes part of the names of
        resources.
        """
        taken = {node.name.partition("/")[0].lower() for node in graph_def.node}
        functions = [function.signature.name.lower() for function in graph_def.library.function]
        candidates = (f"{wanted}_{n}" if n else wanted for n in range(len(taken) + len(functions) + 1))
        free = (n for n in candidates if n not in taken and not any(f.startswith(n) for f in functions))
        return cls(graph_def, next(free), owner)

    def _spell(self, name: str) -> str:
        """Return a valid and unique name for a node, always the same for the same name.

        The given name need not be valid: a signature may be called `default:None`.
        """
        if name not in self._spelled:
            wanted = spelled = _NOT_IN_NAMES.sub("_", name)
            taken = {*self._spelled.values()} if wanted != name or wanted in self._spelled.values() else ()
            numbers = itertools.count(1)
            while spelled in taken:
                spelled = f"{wanted}__{next(numbers)}"  # one underscore: functions inside of a function
            self._spelled[name] = spelled
        return self._spelled[name]

    def node(
        self,
        name: str,
        op: str,
        inputs: Sequence[str] = (),
        *,
        after: Iterable[str] = (),
        device: str = "",
        **attrs: Any,
    ) -> str:
        """Add a node in the editor's scope and return its full name, which is its first output as well.

        `name` is not to be in use: the same name twice gives two nodes of one name. `after` are its control
        inputs; `attrs` are as for `new_node`.
        """
        full = f"{self.scope}/{self._spell(name)}"
        self.graph_def.node.append(new_node(full, op, inputs, after=after, device=device, **attrs))
        return full

    def constant(self, name: str, value: Any, dtype: DType) -> str:
        """Add a constant of this dtype on the CPU and return its name.

        `value` is a number, text, bytes, a list of these or an array.
        """
        tensor = message_class("TensorProto")()
        fill(tensor, np.asarray(value, object if dtype is DType.STRING else dtype.numpy))
        return self.node(name, "Const", device=CPU, dtype=dtype, value=tensor)

    def resource(self, name: str, op: str, **attrs: Any) -> str:
        """Add the handle of a new resource, made by the operation `op`, on the CPU, and return its name.

        Its shared name is unique to the editor's scope and owner.
        """
        shared = f"{self.scope}/{name}/{self.owner}".encode()
        return self.node(name, op, device=CPU, shared_name=shared, container=b"", **attrs)

    def variable(self, name: str, dtype: DType, shape: tuple[int, ...] = ()) -> str:
        """Add the handle of a new variable on the CPU and return its name; nothing initialises it."""
        return self.resource(name, "VarHandleOp", dtype=dtype, shape=shape)

    def pack(
        self, name: str, handles: Sequence[str], *, after: Iterable[str] = (), apart: Container[int] = ()
    ) -> dict[tuple[int, ...], str]:
        """Add, for each device that some of the handles are on, a vector of those handles, in order.

        Returns {numbers of a vector's handles, by their positions in `handles`: the vector's name}. Handles
        whose numbers are in `apart` are left out. The vectors wait for the nodes `after`. KeyError for a
        handle that the graph lacks.
        """
        nodes = {node.name: node for node in self.graph_def.node}
        by_device: dict[str, list[int]] = {}
        for number, handle in enumerate(handles):
            if number in apart:
                continue
            node = nodes[handle.partition(":")[0]]
            while node.op == "Identity":
                node = nodes[node.input[0].partition(":")[0]]
            by_device.setdefault(node.device, []).append(number)
        return {
            (*numbers,): self.node(
                f"{name}_{n}",
                "Pack",
                [handles[number] for number in numbers],
                after=after,
                device=device,
                N=len(numbers),
                T=DType.RESOURCE,
            )
            for n, (device, numbers) in enumerate(by_device.items())
        }

    def placeholder(self, name: str, dtype: DType, shape: tuple[int | None, ...]) -> str:
        """Add a placeholder and return its name; None in the shape is any length."""
        return self.node(name, "Placeholder", dtype=dtype, shape=shape)

    def call(
        self,
        name: str,
        function: PlacedFunction,
        inputs: Sequence[str],
        *,
        device: str = "",
        stateful: bool = True,
    ) -> list[str]:
        """Add a call of a function on these inputs and return the names of its outputs, in order.

        TensorFlow may leave out a call that is not `stateful`, or make it once for several equal ones.
        """
        op = "StatefulPartitionedCall" if stateful else "PartitionedCall"
        node = self.node(
            name,
            op,
            inputs,
            device=device,
            Tin=function.inputs,
            Tout=function.outputs,
            f=function.name,
            config_proto=_as_written_config() if function.as_written else b"",
        )
        return [f"{node}:{index}" if index else node for index in range(len(function.outputs))]

    def function(
        self,
        name: str,
        part: Callable[..., Any],
        inputs: Mapping[str, tuple[DType, Any]],
        *,
        inline: bool = True,
        as_written: bool = False,
    ) -> PlacedFunction:
        """Trace `part`, called with one tensor for each of `inputs`, and add it as a function.

        `inputs` is {argument: (dtype, static shape)}. `part` returns tensors, and calls functions of the
        graph by the names from `privately_named`. With `as_written` TensorFlow's graph optimizers skip it:
        optimizing a large function at its first call costs seconds, and gains nothing if the work is reading
        files and writing rows. `inline` is as in `place`. Raises whatever `part` raises.
        """
        return self.place(name, trace(part, inputs, as_written=as_written), inline=inline)

    def place(self, name: str, traced: TracedFunction, *, inline: bool = True) -> PlacedFunction:
        """Add a traced function and its callees under names of this editor; return the placed function.

        TensorFlow does not put the function's body in the place of its calls unless `inline` is True.
        """
        full = f"{self.scope}_{self._spell(name)}"
        own = traced.definitions
        renames = {f.signature.name: f"{full}_{n}" if n else full for n, f in enumerate(own)}
        for definition in own:
            function = self.graph_def.library.function.add()
            function.CopyFrom(definition)
            rename_functions(function, renames)
        if not inline:
            self.graph_def.library.function[-len(own)].attr["_noinline"].b = True
        return PlacedFunction(
            full,
            tuple(DType(argument.type) for argument in own[0].signature.input_arg),
            tuple(DType(argument.type) for argument in own[0].signature.output_arg),
            traced.as_written,
        )


class TracedFunction(Struct, frozen=True):
    """The FunctionDefs of a part (the first) and of the functions that it calls, under any names."""

    definitions: tuple[Proto, ...]
    as_written: bool


def trace(
    part: Callable[..., Any], inputs: Mapping[str, tuple[DType, Any]], *, as_written: bool = False
) -> TracedFunction:
    """Trace a part, as `GraphEditor.function` does, into functions that `place` adds to any graph.

    `inputs` is {argument: (dtype, static shape)}. Imports TensorFlow; raises whatever `part` raises.
    """
    import tensorflow as tf

    specs = [
        tf.TensorSpec(shape, tf.as_dtype(int(dtype)), name=key) for key, (dtype, shape) in inputs.items()
    ]
    with tf.Graph().as_default():
        traced = tf.compat.v1.wrap_function(part, specs)
        definition = message_class("FunctionDef").FromString(traced.function_def.SerializeToString())
        library = message_class("FunctionDefLibrary").FromString(
            traced.graph.as_graph_def().library.SerializeToString()
        )
    own = (definition, *(f for f in library.function if not _BORROWED.match(f.signature.name)))
    for function in own:
        _merge_constants(function)
        if as_written:
            _keep_as_written(function)
    return TracedFunction(own, as_written)


class PlacedFunction(Struct, frozen=True):
    """A function of the graph: its name, and the dtypes of its arguments and results."""

    name: str
    inputs: tuple[DType, ...]
    outputs: tuple[DType, ...]
    as_written: bool


def _merge_constants(function: Proto) -> None:
    """Merge a function's equal constants, in place: tracing makes one for each use.

    The first of them stays. Constants with inputs or colocation are left as they are.
    """
    kept: dict[bytes, str] = {}
    merged: dict[str, str] = {}
    nodes = []
    for node in function.node_def:
        if node.op == "Const" and not node.input and "_class" not in node.attr:
            anonymous = type(node)(op=node.op, device=node.device, attr=node.attr)
            name = kept.setdefault(anonymous.SerializeToString(deterministic=True), node.name)
            if name != node.name:
                merged[node.name] = name
                continue
        nodes.append(node)
    for node in nodes:
        for index, reference in enumerate(node.input):
            node.input[index] = _with_producer(reference, merged)
    for name, reference in dict(function.ret).items():  # a map that is written to must not be iterated over
        function.ret[name] = _with_producer(reference, merged)
    put_nodes(function.node_def, nodes)


def _with_producer(reference: str, renamed: Mapping[str, str]) -> str:
    """Return a node's input with the name in it replaced by the one in `renamed` ({old: new}), if any.

    Inputs are written `^node`, `node` or `node:output`.
    """
    control = "^" if reference.startswith("^") else ""
    node, colon, output = reference.removeprefix("^").partition(":")
    return control + renamed.get(node, node) + colon + output


def _keep_as_written(function: Proto) -> None:
    """Mark a function, in place, so that graph optimizers skip it and the functions that it calls.

    Source: tensorflow/core/grappler/optimizers/meta_optimizer.cc, which skips functions of tf.data; the
    `config_proto` of a call decides how its function is optimized.
    """
    function.attr["_tf_data_function"].b = True
    for node in function.node_def:
        if "config_proto" in node.attr:
            node.attr["config_proto"].s = _as_written_config()


@cache
def _as_written_config() -> bytes:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return bytes(config.SerializeToString())


_import_numbers = itertools.count()
_BORROWED = re.compile("^borrowed_[0-9]+__")


def privately_named(library: Proto, nodes: Collection[Proto]) -> Proto:
    """Make a GraphDef of copies of `nodes` and the functions that they need, to import into a part.

    The functions, from `library`, get names that are unique in this process; `GraphEditor.function` restores
    their own. Nodes lose their colocation with others. GraphError if a function is missing.
    """
    # A process of TensorFlow has only one function with a name, and it numbers those that it makes itself.
    graph_def = message_class("GraphDef")()
    graph_def.node.extend(nodes)
    definitions = {function.signature.name: function for function in library.function}
    prefix = f"borrowed_{next(_import_numbers)}__"
    renames = {name: prefix + name for name in reachable(nodes, definitions)}
    for name in sorted(renames):
        function = graph_def.library.function.add()
        function.CopyFrom(definitions[name])
        rename_functions(function, renames)
    for node in graph_def.node:
        if "_class" in node.attr:  # colocation with a node that may not be among `nodes`
            del node.attr["_class"]
        _rename_called(node, renames)
    return graph_def


def rename_functions(function: Proto, renames: Mapping[str, str]) -> None:
    """Rename a function and the functions that it calls, in place, by `renames` ({old name: new name}).

    A name that `privately_named` made and `renames` lacks becomes the function's own again.
    """
    function.signature.name = _renamed(function.signature.name, renames)
    for node in function.node_def:
        _rename_called(node, renames)


def _rename_called(node: Proto, renames: Mapping[str, str]) -> None:
    for function in called(node):
        function.name = _renamed(function.name, renames)


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    return renames.get(name) or _BORROWED.sub("", name)
