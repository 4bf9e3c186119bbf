"""Build graphs from objects that a builder returns: a Keras model, or a `tf.Module` with `signatures`.

They run in a graph as other builders do: variables are symbols and initialisers are never run, so nothing is
allocated. Then the object is called on placeholders of that graph. The object graph is kept, too: by its
edges an object-based checkpoint can be matched (`exporter.checkpoint.object_graph`).

Nothing here imports Keras: a model of Keras 3 or tf-keras exists only if the user's own code imported it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from exporter.catalog import Naming
from exporter.checkpoint.object_graph import ObjectGraph, TrackedObject, TrackedVariable
from exporter.errors import BuilderError
from exporter.graph.signatures import DEFAULT_SIGNATURE
from exporter.graph.user_errors import failures
from exporter.while_needed import WhileNeeded

Tensors = Mapping[str, Any]

# Names of unnamed inputs in Keras 3, with a number that counts all inputs of a process.
_NUMBERED = re.compile(r"(keras_tensor(_\d+)?)?")

_LIST = "trainable_variables"
_UNNAMED = "Variable"  # TensorFlow's name for a variable without a name


def objects_among(result: Any) -> dict[str, Any]:
    """Return {signature: model or module} for the Keras models and `tf.Module`s in a builder's result.

    The result is a model or module, which has the name "", or a mapping of them; other values are left out.
    """
    if _is_object(result):
        return {"": result}
    named = result if isinstance(result, Mapping) else {}
    return {str(name): one for name, one in named.items() if _is_object(one)}


def holding(models: Mapping[str, Any]) -> Any:
    """Return the model named "", else a new `tf.Module` that has these models as attributes, by name."""
    import tensorflow as tf

    if "" in models:
        return models[""]
    held = tf.Module()
    for name, model in models.items():
        setattr(held, name, model)
    return held


def _is_object(result: Any) -> bool:
    import tensorflow as tf

    return isinstance(result, tf.Module) or _is_keras_model(result)


def signatures_of(model: Any, label: str, name: str = "") -> dict[str, tuple[Tensors, Tensors]]:
    """Return {signature: (inputs, outputs)} of a model or module, called on new placeholders.

    They are made in the default graph, which gets the nodes of the calls. Inputs and outputs are tensors by
    name. With a `name`, the only or default signature gets that name, and others `<name>_<signature>`;
    `label` names the builder in messages. BuilderError if the model has no signatures, its inputs are
    unknown, it was built before, or the call fails; an ExportError of its own code passes unchanged.
    """
    _refuse_foreign_variables(model, label)
    where = f"{label}, {name!r}" if name else label
    if _is_keras_model(model):
        inputs, arguments = _keras_inputs(model, where)
        with failures(f"calling the model of {where}"):
            result = model(arguments, training=False)
        names = [*(_quietly(lambda: model.output_names) or ())]
        return {name or DEFAULT_SIGNATURE: (inputs, _outputs(result, names))}
    functions = getattr(model, "signatures", None)
    if not isinstance(functions, Mapping) or not functions:
        raise BuilderError(
            f"the module that {where} returned has no signatures",
            cause="expected an attribute `signatures`: tf.functions with an input_signature, by name",
            hint="module.signatures = {'serving_default': module.serve}",
        )

    def called(own: str) -> str:
        is_main = len(functions) == 1 or own == DEFAULT_SIGNATURE
        return own if not name else name if is_main else f"{name}_{own}"

    return {
        called(own): _call(function, f"{where}, signature {own!r}") for own, function in functions.items()
    }


def as_loaded(model: Any, naming: Naming) -> tuple[str, ...]:
    """Change a Keras model so that it answers as after loading a checkpoint, and return notes for the user.

    Layers begin each request with a reset state, since a served model keeps none. If files store values by
    layer (`naming`), adapters (LoRA) are switched off, since Keras merges them into kernels when it saves,
    and layers quantized by a calibration (GPTQ, AWQ) count as calibrated. Other settings are not changed. ()
    for an object that is not a Keras model.
    """
    if (keras := keras_of(model)) is None:
        return ()
    layers = [*model._flatten_layers()]
    stateful = [layer for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]
    for layer in stateful:
        layer.stateful = False
    adapted = [layer for layer in layers if naming is Naming.LAYERS and getattr(layer, "lora_enabled", False)]
    for layer in adapted:
        layer.lora_enabled = False
    for layer in layers if naming is Naming.LAYERS else ():
        for mode in _CALIBRATED & {getattr(layer, "quantization_mode", None)}:
            setattr(layer, f"is_{mode}_calibrated", True)
    names = [", ".join(dict.fromkeys(repr(layer.name) for layer in some)) for some in (stateful, adapted)]
    said = (
        "{} (stateful=True): a served model keeps no state, each request begins with zeros",
        "{} (LoRA): Keras merged the adapters into what the file holds, and begins again with none",
    )
    return tuple(text.format(some) for text, some in zip(said, names, strict=True) if some)


# Quantization modes of Keras 3 in which a layer uses the quantized kernel only once it is loaded.
_CALIBRATED = {"gptq", "awq"}


def guessed_inputs(model: Any) -> tuple[str, ...]:
    """Return one note for the user if a Keras model that declares no inputs is served with floats.

    () for any other model.
    """
    if not _is_keras_model(model) or _declared_inputs(model) is not None:
        return ()
    spec = _built_shapes(model)
    if spec is None or not spec.dtype.is_floating:
        return ()
    return (
        f"the model does not say of which type its inputs are, they are served as {spec.dtype.name}: if it "
        "takes integers, as ids, let a builder call it on keras.Input(..., dtype='int64')",
    )


def _refuse_foreign_variables(model: Any, label: str) -> None:
    """Raise BuilderError for a model with variables outside of the default graph: it was built before.

    `label` names the builder in the message.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    for item in tf.train.TrackableView(model).descendants():
        variable = _value_of(item)
        if variable is not None and getattr(variable.handle, "graph", None) is not graph:
            raise BuilderError(
                f"{label} returned an already built model: its variable {variable.name!r} has a value",
                cause="an export builds the model again, of symbols, and takes values from the checkpoint",
                hint="make the model inside of the builder",
            )


class ObjectView(Struct, frozen=True):
    """The objects below a model or module, as TensorFlow would save them."""

    objects: ObjectGraph
    # {variable's node: its Keras path; its path among the objects if its name is missing or not unique}.
    names: Mapping[str, str]


def view_objects(
    model: Any, variable_of: Callable[[Any], TrackedVariable | None] | None = None
) -> ObjectView:
    """Return the objects below a model, as TensorFlow would save them, and the names of its variables.

    A Keras model also has a list of its trainable variables as a child. `variable_of` returns the variable
    that an object is, None for another object; by default a variable is known by its node in the graph.
    """
    import tensorflow as tf

    view = tf.train.TrackableView(model)
    items = list(view.descendants())
    edges = [dict(view.children(item)) for item in items]
    for item, children in [*zip(items, edges, strict=True)]:
        if _is_keras_model(item) and _LIST not in children:  # optimizers have such a list, too
            children[_LIST] = _as_list(item.trainable_variables, items, edges)
    numbers = {id(item): number for number, item in enumerate(items)}
    objects = ObjectGraph(
        tuple(
            TrackedObject(
                {name: numbers[id(child)] for name, child in children.items() if id(child) in numbers},
                (variable_of or _variable)(item),
                table=_table_node(item),
            )
            for item, children in zip(items, edges, strict=True)
        )
    )
    return ObjectView(objects, dict(_names(objects)))


def _as_list(variables: Sequence[Any], items: list[Any], edges: list[dict[str, Any]]) -> object:
    """Return a new object with these variables as children "0", "1" ..., for the object graph.

    It is appended to `items`, its children to `edges`; so are variables that `items` lacks, without children.
    """
    known = {id(item) for item in items}
    listed = object()
    new = [listed, *(variable for variable in variables if id(variable) not in known)]
    items += new
    edges += [{str(number): variable for number, variable in enumerate(variables)}, *({} for _ in new[1:])]
    return listed


def _names(objects: ObjectGraph) -> Iterator[tuple[str, str]]:
    used = Counter(entry.variable.name for entry in objects.objects if entry.variable is not None)
    for number, entry in enumerate(objects.objects):
        if entry.variable is not None:
            name = entry.variable.name
            is_unclear = used[name] > 1 or name.partition("_")[0] == _UNNAMED
            yield entry.variable.tensor, objects.paths[number] if is_unclear else name


# The bases of tf-keras' classes before the first of the builders that run now.
_BASES: dict[type, tuple[type, ...]] = {}


@contextlib.contextmanager
def unchanged_classes() -> Iterator[None]:
    """Restore the bases of a program's own tf-keras classes once no builder runs in a graph any more.

    tf-keras gives a subclass of Model other bases while there is no eager execution, and models that exist
    already would lose theirs. Blocks may overlap, in several threads: the last one to end restores them.
    (Source: tf_keras/src/utils/version_utils.py, swap_class.)
    """
    loaded: list[Any] = [sys.modules.get(name) for name in ("keras", "tf_keras")]
    with _PUT_BACK():
        for keras in loaded:
            if hasattr(keras, "layers") and not hasattr(keras, "Variable"):  # Keras 2, or its name in 2.15
                for known in _subclasses(keras.layers.Layer):
                    _BASES.setdefault(known, known.__bases__)
        yield


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    try:
        yield
    finally:
        while _BASES:
            changed, bases = _BASES.popitem()
            if changed.__bases__ != bases:
                changed.__bases__ = bases


_PUT_BACK = WhileNeeded(_put_back)


@contextlib.contextmanager
def counted_anew() -> Iterator[None]:
    """Let Keras 3 number names from the beginning in the block, and restore its own count after it.

    So a builder makes the same names whether or not its program made models before. Only this thread's count
    changes.
    """
    before = getattr(_keras_counts(), _COUNTS, None)
    _count_from({})
    try:
        yield
    finally:
        _count_from(before or {})


_COUNTS = "object_name_uids"


def _keras_counts() -> Any:
    """Return the object in which Keras 3 counts the names of this thread; None before Keras 3 is loaded."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    return getattr(state, "GLOBAL_STATE_TRACKER", None)


def _count_from(counts: Mapping[str, int]) -> None:
    if (tracker := _keras_counts()) is not None:
        setattr(tracker, _COUNTS, defaultdict(int, counts))


def _subclasses(root: type) -> Iterator[type]:
    """Yield all classes derived from a class, directly or not; one with several bases may come twice."""
    children: list[type] = root.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def keras_of(value: Any) -> Any:
    """Return the Keras module (Keras 3 or tf-keras) whose Model the value is; None for any other value."""
    kerases = (sys.modules.get(name) for name in ("keras", "tf_keras"))
    return next((keras for keras in kerases if keras is not None and isinstance(value, keras.Model)), None)


def _is_keras_model(value: Any) -> bool:
    return keras_of(value) is not None


def _variable(item: Any) -> TrackedVariable | None:
    variable = _value_of(item)
    if variable is None:
        return None
    node = variable.handle.op.name
    # Keras' own path: in a graph the node of an unnamed model's second layer has another name, `dense_1_1`.
    return TrackedVariable(getattr(item, "path", None) or node, node)


def _table_node(item: Any) -> str:
    """Return the name of a table's node if training fills the table, else "".

    "" also for a table outside of a graph.
    """
    import tensorflow as tf

    tables = tf.lookup.experimental
    if not isinstance(item, tables.MutableHashTable | tables.DenseHashTable):
        return ""
    handle = item.resource_handle
    return str(handle.op.name) if tf.is_symbolic_tensor(handle) else ""


def _value_of(item: Any) -> Any:
    """Return the TensorFlow variable that an object is or wraps; None for other objects."""
    import tensorflow as tf

    kind: Any = getattr(sys.modules.get("keras"), "Variable", None)  # Keras 2 has none
    if kind is not None and isinstance(item, kind):
        item = item.value
    return item if isinstance(item, tf.Variable) and hasattr(item, "handle") else None


def _keras_inputs(model: Any, label: str) -> tuple[Tensors, Any]:
    """Return new placeholders for a Keras model's inputs: by name, and in the structure of its calls.

    BuilderError if the model's inputs are unknown; `label` names the builder in the message.
    """
    import tensorflow as tf

    structure = _declared_inputs(model)
    if structure is None:
        structure = _built_shapes(model)
    if structure is None:
        raise BuilderError(
            f"the inputs are unknown of the model that {label} returned",
            hint="call it once on keras.Input(...) in the builder, or return a tf.Module that holds it, with "
            "signatures",
        )
    names = _input_names(model, structure)
    flat = [_placeholder(spec, name) for spec, name in zip(tf.nest.flatten(structure), names, strict=True)]
    return dict(zip(names, flat, strict=True)), tf.nest.pack_sequence_as(structure, flat)


def _declared_inputs(model: Any) -> Any:
    """Return the inputs that a model itself declares, in the structure of its calls.

    None if there are none.
    """
    structure = _quietly(lambda: model.input)
    if structure is not None:
        return structure
    inputs = _quietly(lambda: model.inputs) or []  # a Sequential has no `input` until it is called
    return inputs[0] if len(inputs) == 1 else None


def _input_names(model: Any, structure: Any) -> list[str]:
    """Return a name for each input in `structure`, in the order of `tf.nest.flatten`.

    It is the input's key in a dict, else the program's own name, else `inputs` (of one input) or `input_<i>`.
    """
    import tensorflow as tf

    if isinstance(structure, Mapping):
        return sorted(structure)  # the order of tf.nest
    flat = tf.nest.flatten(structure)
    own = _quietly(lambda: model.input_names) or [getattr(spec, "name", None) or "" for spec in flat]
    names = [name.partition(":")[0] for name in own]
    if len(names) == len({*names}) == len(flat) and not any(map(_NUMBERED.fullmatch, names)):
        return names
    return ["inputs"] if len(flat) == 1 else [f"input_{number}" for number in range(len(flat))]


def _built_shapes(model: Any) -> Any:
    """Return a TensorSpec, of any batch size, of a subclassed model's only input, from its build shape.

    Its dtype is the model's `input_dtype`, else the one that it computes in. None if the model was not built,
    or has several inputs.
    """
    import tensorflow as tf

    config = _quietly(model.get_build_config) or {}
    shapes = config.get("shapes_dict") or {"inputs": config.get("input_shape")}
    dtype = getattr(model, "input_dtype", None) or model.compute_dtype
    if len(shapes) != 1:
        return None
    (shape,) = shapes.values()
    if not isinstance(shape, tuple | list) or any(isinstance(size, tuple | list) for size in shape):
        return None
    return tf.TensorSpec([None, *shape[1:]], dtype)


def _placeholder(spec: Any, name: str) -> Any:
    """Return a new placeholder (dense, sparse or ragged, as `spec` declares) for an input of any batch size.

    `spec` is a TypeSpec or one of Keras' own tensors; `name` is the input's.
    """
    import tensorflow as tf

    if isinstance(spec, tf.SparseTensor | tf.RaggedTensor):  # Keras 2 declares inputs by placeholders
        spec = tf.type_spec_from_value(spec)
    if isinstance(spec, tf.SparseTensorSpec | tf.RaggedTensorSpec):
        return _composite(spec, name)
    if isinstance(kind := getattr(spec, "type_spec", None), tf.RaggedTensorSpec):
        return _composite(kind, name)
    shape = [None, *spec.shape[1:]] if spec.shape.__class__ is tuple or spec.shape.rank else spec.shape
    if getattr(spec, "ragged", False):
        return _composite(tf.RaggedTensorSpec(shape, spec.dtype), name)
    if getattr(spec, "sparse", False) or isinstance(getattr(spec, "type_spec", None), tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(spec.dtype, shape, name=_node_name(name))
    return tf.compat.v1.placeholder(spec.dtype, shape, name=_node_name(name))


def _composite(spec: Any, name: str) -> Any:
    """Return a sparse or ragged tensor of new placeholders, one for each component of its TypeSpec.

    They are named `name`, `name_1` and so on.
    """
    import tensorflow as tf

    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = [
        tf.compat.v1.placeholder(part.dtype, part.shape, name=_node_name(f"{name}_{n}" if n else name))
        for n, part in enumerate(flat)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _node_name(name: str) -> str:
    """Return `name` if it is valid for a node, else `input`."""
    return name if name and (name[0].isalnum() or name[0] == ".") and " " not in name else "input"


def _outputs(result: Any, names: list[str]) -> Tensors:
    """Return {output's name: tensor} for the result of a call.

    A dict has its own keys; the tensors of another structure have `names`, or `output_<i>` if these do not
    fit.
    """
    import tensorflow as tf

    if isinstance(result, Mapping):
        return result
    flat = tf.nest.flatten(result)
    if len(names) != len(flat) or len({*names}) != len(names):
        names = [f"output_{number}" for number in range(len(flat))]
    return dict(zip(names, flat, strict=True))


def _call(function: Any, where: str) -> tuple[Tensors, Tensors]:
    """Call a tf.function on new placeholders, and return its inputs and outputs, tensors by name.

    BuilderError if it is not a tf.function, or if the call fails; an ExportError of its code passes
    unchanged. `where` names it in messages.
    """
    import tensorflow as tf

    if not hasattr(function, "get_concrete_function"):
        raise BuilderError(
            f"builder {where} is not a tf.function", cause=f"it is a {type(function).__name__}"
        )
    with failures(f"tracing {where}"):
        traced = function.get_concrete_function()
        arguments = traced.structured_input_signature
        specs = tf.nest.flatten(arguments, expand_composites=False)
        names = _argument_names(specs, getattr(traced, "_arg_keywords", None) or ())
        placeholders = [_placeholder(spec, name) for spec, name in zip(specs, names, strict=True)]
        positional, by_name = tf.nest.pack_sequence_as(arguments, placeholders)
        result = function(*positional, **by_name)
    return dict(zip(names, placeholders, strict=True)), _outputs(result, [])


def _argument_names(specs: Sequence[Any], keywords: Sequence[str]) -> list[str]:
    """Return a name for each of a function's tensors, in order.

    It is the tensor's own, else one of `keywords`, else `input_<i>`. `specs` has the TypeSpec of each tensor.
    `keywords` has a name for each component; sparse and ragged tensors have several components, of which the
    first names the tensor.
    """
    import tensorflow as tf

    names, place = [], 0
    for number, spec in enumerate(specs):
        own = getattr(spec, "name", None)
        if own is None and not isinstance(spec, tf.TensorSpec) and place < len(keywords):
            own = keywords[place]
        names.append(own or f"input_{number}")
        place += len(tf.nest.flatten(spec, expand_composites=True))
    return names


def _quietly(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, which reads a property of a Keras model; None if the model lacks it.

    A model lacks it if reading raises AttributeError, ValueError, RuntimeError or NotImplementedError.
    """
    try:
        return read()
    except (AttributeError, ValueError, RuntimeError, NotImplementedError):
        return None
