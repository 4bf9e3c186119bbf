"""Run a user's builder in a fresh graph, and return its graph as a MetaGraphDef.

Only this module and `object_models` import TensorFlow in the graph stage. A builder may return:

- `(inputs, outputs)`: two dicts of tensors by name, the signature `serving_default`;
- `{signature name: (inputs, outputs)}`, with `predict`, `classify` or `regress` as an optional third element;
- a Keras model, or a `tf.Module` with `signatures` (`exporter.graph.object_models`);
- `{signature name: such a model or module}`, for example two towers, called by their names in the trainer's
  object.

*Vocabularies* (`known_contents`). In a graph the size of a table is a tensor without a value, but code
derives the shape of an embedding from it: `Embedding(lookup.vocabulary_size(), 8)`,
`len(lookup.get_vocabulary())`. The contents of a static table are known when it is made, so it is filled and
read in a session of its own.

*Init scopes* (`_InitScopes`). `tf.init_scope()` leaves functions, but not a plain graph, in which builders
run: TensorFlow and Keras make variables in it, which are symbols there. Some libraries refuse to work unless
`tf.executing_eagerly()` is True in it (Sonnet 2, `assert_tf2`). Their builders run once more, with eager
execution in the scopes that other code than TensorFlow and Keras opens. TensorFlow keeps the context that the
scope enters on a stack, one for each thread. (Source: `init_scope` in tensorflow/python/framework/ops.py,
`_ContextSwitchStack` in tensorflow/python/eager/context.py.)
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Naming, TensorRef
from exporter.errors import BuilderError, UsageError
from exporter.graph.archived_model import keras_places
from exporter.graph.code_recorder import import_code, is_users, recording
from exporter.graph.lookup_tables import table_keys
from exporter.graph.metagraph import with_signatures
from exporter.graph.nodes import GraphIndex
from exporter.graph.object_models import (
    ObjectView,
    as_loaded,
    counted_anew,
    guessed_inputs,
    holding,
    objects_among,
    signatures_of,
    unchanged_classes,
    view_objects,
)
from exporter.graph.signatures import DEFAULT_SIGNATURE, METHODS, check_method
from exporter.graph.source_graph import GraphRequest, SourceGraph, TableKey, VariableKey
from exporter.graph.sources import (
    BuilderFile,
    Code,
    find_builder,
    importable,
    named_function,
    no_function,
)
from exporter.graph.user_errors import NEEDS_EAGER, error_line, failures, way_out
from exporter.storage.files import nearest
from exporter.storage.local_paths import quoted
from exporter.while_needed import WhileNeeded
from exporter.wire import protos
from exporter.wire.protos import Proto

# The graphs that builders run in: tables in others, such as a training in another thread, are not touched.
_GRAPHS: WeakSet[Any] = WeakSet()


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Let `size` and `export` of builders' static tables return values in the block, as in eager execution.

    Both methods of TensorFlow's StaticHashTable are replaced, for all threads. Tables that are not in a
    builder's graph, and tables that cannot be filled yet, give the same results as before.
    """
    from tensorflow.python.ops.lookup_ops import StaticHashTable

    size, export = StaticHashTable.size, StaticHashTable.export

    def known_size(table: Any, name: str | None = None) -> Any:
        found = _read(table, size)
        return size(table, name) if found is None else int(found)  # Keras takes no numpy number for a size

    def known_export(table: Any, name: str | None = None) -> Any:
        found = _read(table, export)
        return export(table, name) if found is None else _eager(found)

    StaticHashTable.size, StaticHashTable.export = known_size, known_export
    try:
        yield
    finally:
        StaticHashTable.size, StaticHashTable.export = size, export


known_contents = WhileNeeded(_known)


def _read(table: Any, method: Callable[[Any], Any]) -> Any:
    """Fill a static table in a session of its own and return the value of `method`, `size` or `export`.

    None if the table is not in a builder's graph, or if TensorFlow cannot run it. Adds the method's nodes to
    that graph.
    """
    import tensorflow as tf

    graph = getattr(table.resource_handle, "graph", None)
    if graph is None or graph not in _GRAPHS:
        return None
    with contextlib.suppress(tf.errors.OpError, ValueError):
        with graph.as_default(), graph.control_dependencies(None):
            wanted = method(table)
        with tf.compat.v1.Session(graph=graph) as session:
            if table._init_op is not None:  # a lookup layer without a vocabulary has none
                session.run(table._init_op)
            return session.run(wanted)
    return None


def _eager(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return eager tensors of these values, in order, made in another thread, which has no default graph."""
    import tensorflow as tf

    with ThreadPoolExecutor(1) as outside:
        return tuple(outside.map(tf.constant, values))


Builder = Callable[..., Any]

_TRAINING_FLAGS = ("training", "is_training")
_EXPECTED = (
    "expected (inputs, outputs), two dicts of tensors, or {signature: (inputs, outputs[, method])}, "
    "or a Keras model, or a tf.Module with signatures, or a dict of such models by name"
)


def load_builder(request: GraphRequest, label: str = "") -> SourceGraph:
    """Run the request's builder and return its graph, with the signatures that it returns.

    `label` names the builder in messages; without it `pkg.mod:fn` does. An ExportError of the builder's own
    code passes unchanged.

    Raises:
        UsageError: the request names tensors, too, or gives arguments that the builder does not take, or
            TensorFlow Serving could not answer a signature.
        BuilderError: the builder cannot be imported, fails, or its files are edited meanwhile.
        GraphError: its signatures cannot be served (and subclasses).
        ImportError: TensorFlow is not installed.
        TensorFlowNeeded: the installed TensorFlow is not supported.
    """
    require_no_tensors(request)
    return source_of(run_builder(request, label), request)


def require_no_tensors(request: GraphRequest) -> None:
    """Raise UsageError if a request names tensors or signatures: a builder returns its signatures itself."""
    if request.inputs or request.outputs or request.signatures:
        raise UsageError(
            "--input, --output and --signatures name tensors of a .meta file or a SavedModel",
            cause="a builder returns its signatures itself",
        )


class Built(Struct, frozen=True):
    """A builder's result: a MetaGraphDef (in the private pool) with signatures, and the builder's code.

    If the builder returned an object, `view` is its object graph and `layers` the places of its variables.
    """

    label: str
    meta_graph: Proto
    view: ObjectView | None
    layers: Mapping[str, tuple[TensorRef, ...]]
    tables: Mapping[str, TableKey]
    notes: tuple[str, ...] = ()
    code: Code = Code()


def run_builder(request: GraphRequest, label: str = "") -> Built:
    """Run a request's builder in a fresh graph and return its result; a builder given as text is imported.

    `label` names the builder in messages; without it `pkg.mod:fn` does. An ExportError of the builder's own
    code passes unchanged.

    Raises:
        UsageError: it does not take the given arguments, or TensorFlow Serving could not answer a signature.
        BuilderError: it cannot be imported, fails, returns something else, or its files are edited meanwhile.
        ImportError: TensorFlow is not installed.
        TensorFlowNeeded: the installed TensorFlow is not supported.
    """
    import tensorflow  # noqa: F401  # a builder runs in it: that it is missing is not the builder's error

    with importable(), recording() as recorder:
        builder, name = resolve(request.model)
        label = label or name
        kwargs = keyword_arguments(builder, request.model_args, label)
        built = _run(builder, kwargs, label, request.naming)
        code = recorder.code(builder, _main(request.model), is_loaded=isinstance(request.model, str))
    return replace(built, code=code)


def source_of(built: Built, request: GraphRequest) -> SourceGraph:
    """Return a source graph of a builder's result, with its signatures, objects, tables and code.

    Changes the MetaGraphDef in `built`. The request must name no tensors (`require_no_tensors`). UsageError
    if there are no signatures, or an option of the request does not fit the graph; GraphError and subclasses
    if the signatures cannot be served.
    """
    source = with_signatures(built.meta_graph, request, label=built.label, directory=Path.cwd())
    source = replace(source, code=built.code)
    if built.tables:
        index = GraphIndex.of(built.meta_graph)
        source = replace(source, tables=table_keys(built.meta_graph, index, built.tables))
    if built.view is None:
        return source
    keys = {**source.keys, **{node: VariableKey(name) for node, name in built.view.names.items()}}
    notes = (*source.notes, *built.notes)
    return replace(source, keys=keys, objects=built.view.objects, layers=built.layers, notes=notes)


def _main(model: str | Builder | None) -> BuilderFile | None:
    """Return the Python file of a builder; None if there is none, or if it belongs to an installed library.

    Given as text, `pkg.mod:fn` or `path/file.py:fn`, the builder is not imported: then a library's file is
    returned, too, and BuilderError is raised if the file or the top-level module does not exist. A function's
    file is the file that defines it, an object's that of its class.
    """
    if isinstance(model, str):
        return find_builder(model.rpartition(":")[0])
    _, found = named_function(model)
    return found if found is not None and is_users(str(found.path)) else None


def resolve(model: str | Builder | None) -> tuple[Builder, str]:
    """Return a builder's function and its name for messages (`pkg.mod:fn`).

    A function is returned as it is; text (`pkg.mod:fn` or `path/file.py:fn`) is imported, which runs the
    module's code. BuilderError if there is no such file or function, or importing it fails.
    """
    if callable(model):
        return model, f"{getattr(model, '__module__', '?')}:{getattr(model, '__qualname__', repr(model))}"
    where, _, name = str(model).rpartition(":")
    if where.endswith(".py") and not Path(where).is_file():
        close = nearest(Path(where))
        raise BuilderError(
            f"there is no file {where}",
            hint=f"did you mean --model {quoted(f'{close}:{name}')}?"
            if close is not None and close.suffix == ".py"
            else "name the builder's file: --model path/file.py:fn",
        )
    try:
        module = import_code(where)
    except (Exception, SystemExit) as error:
        raise BuilderError(
            f"importing {where} failed", cause=error_line(error), hint=way_out(error)
        ) from error
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise no_function(where, name, functions)
    return found, str(model)


def keyword_arguments(builder: Builder, given: Mapping[str, str], label: str) -> dict[str, Any]:
    """Return the keyword arguments to call a builder with, by name.

    `given` has the texts of `--model-arg` by name: they are converted to the type of the annotation or
    default. A builder with `**kwargs` accepts any name, with its text. Parameters `training` and
    `is_training` that are not given are False. `label` names the builder in messages. UsageError for an
    argument that the builder does not accept, a text that does not convert, or a required argument without a
    value.
    """
    parameters = _parameters(builder)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = set(given) - set(named) if not takes_any else set()
    if unknown:
        raise UsageError(
            f"{label} takes no argument {min(unknown)!r}",
            cause=f"its arguments are: {', '.join(named) or 'none'}",
        )
    kwargs = {name: _converted(name, text, named.get(name)) for name, text in given.items()}
    kwargs |= {flag: False for flag in _TRAINING_FLAGS if flag in named and flag not in given}
    missing = [n for n, p in named.items() if p.default is p.empty and n not in kwargs]
    if missing:
        raise UsageError(
            f"{label} needs the argument {missing[0]!r}", hint=f"give it: --model-arg {missing[0]}=VALUE"
        )
    return kwargs


def _parameters(builder: Builder) -> Mapping[str, inspect.Parameter]:
    """Return a builder's parameters by name, with annotations as types if they can be resolved.

    Empty for builtins without a signature.
    """
    for eval_str in (True, False):
        with contextlib.suppress(NameError, AttributeError, SyntaxError, ValueError, TypeError):
            return inspect.signature(builder, eval_str=eval_str).parameters
    return {}


def _converted(name: str, text: str, parameter: inspect.Parameter | None) -> Any:
    """Convert the text of `--model-arg NAME=TEXT` to the parameter's bool, int or float.

    The type is the annotation's, else the default's. For other types, and if `parameter` is None, the text is
    returned. A bool is `true`, `false`, `1` or `0`, in any case. UsageError if the text cannot be converted.
    """
    wanted = parameter.annotation if parameter is not None else str
    if wanted not in (bool, int, float, str):
        wanted = type(parameter.default) if parameter is not None else str
    words = {"true": True, "1": True, "false": False, "0": False}
    try:
        if wanted is bool:
            return words[text.lower()]
        return wanted(text) if wanted in (int, float) else text
    except (ValueError, KeyError):
        raise UsageError(f"--model-arg {name}={text}: expected a {wanted.__name__}") from None


_FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}
# Modules whose frames are between the scope and the code that opens it.
_ON_THE_WAY = (
    __name__,
    "contextlib",
    "tensorflow.python.framework.ops",
    "tensorflow.python.util",
    "tensorflow.python.autograph",
)


class _InitScopes(Struct):
    """The init scopes opened in a graph; `are_asked_for` if other code than a framework opened one."""

    graph: Any
    are_eager: bool = False
    are_asked_for: bool = False

    @contextlib.contextmanager
    def in_graph(self) -> Iterator[None]:
        """Make the graph this thread's default inside the block, and choose the context of init scopes there.

        A scope that other code than TensorFlow or Keras opens sets `are_asked_for`, and is eager if
        `are_eager`. Every other scope is the graph's.
        """
        from tensorflow.python.eager import context

        with self.graph.as_default():
            switches = context.context().context_switches
            switches.push(False, self._enter, self.graph._device_function_stack)
            try:
                yield
            finally:
                switches.pop()

    def _enter(self) -> contextlib.AbstractContextManager[Any]:
        from tensorflow.python.eager import context

        if _opened_by() in _FRAMEWORKS:
            return self.in_graph()
        self.are_asked_for = True
        return context.eager_mode() if self.are_eager else self.in_graph()


def _opened_by() -> str:
    """Return the top-level package, such as "sonnet", of the code that opens the current init scope.

    It is the first caller outside of `_ON_THE_WAY`; "" if its module has no name.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith(_ON_THE_WAY):
        frame = frame.f_back
    return _module_of(frame).partition(".")[0]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _run(builder: Builder, kwargs: Mapping[str, Any], label: str, naming: Naming) -> Built:
    """Call a builder in a fresh graph and return its result as `Built`; `label` names it in messages.

    If the builder fails after its code opened an init scope, it is called again, in another graph, with eager
    execution in such scopes. If the second call fails, too, the first error is raised, with a hint about
    eager execution if the causes differ. BuilderError if the builder fails or returns something else;
    UsageError for a signature that TensorFlow Serving could not answer. An ExportError of the builder's own
    code passes unchanged.
    """
    import tensorflow as tf

    try:
        return _build(builder, kwargs, label, naming, scopes := _InitScopes(tf.Graph()))
    except BuilderError as error:
        if not scopes.are_asked_for:
            raise
        first = error
    try:
        return _build(builder, kwargs, label, naming, _InitScopes(tf.Graph(), are_eager=True))
    except BuilderError as error:
        if error.cause != first.cause:
            first.hint = NEEDS_EAGER
    raise first


def _build(
    builder: Builder, kwargs: Mapping[str, Any], label: str, naming: Naming, scopes: _InitScopes
) -> Built:
    """Call a builder once, in the graph of `scopes`, and return its result; `label` names it in messages.

    `naming` is how the checkpoint names tensors. BuilderError if the builder fails, returns something else,
    or its graph has more than 2 GiB of constants; UsageError for a signature that TensorFlow Serving could
    not answer. An ExportError of the builder's own code passes unchanged.
    """
    import tensorflow as tf

    graph = scopes.graph
    view, layers, notes = None, dict[str, tuple[TensorRef, ...]](), tuple[str, ...]()
    _GRAPHS.add(graph)
    with unchanged_classes(), known_contents():
        with scopes.in_graph(), failures(f"builder {label}"):
            result = _made(builder, kwargs)
        if models := objects_among(result):
            notes = tuple(note for one in models.values() for note in as_loaded(one, naming))
            with scopes.in_graph():
                others = {} if "" in models else {n: one for n, one in result.items() if n not in models}
                entries = [signatures_of(one, label, name) for name, one in models.items()]
                result = {name: entry for some in (others, *entries) for name, entry in some.items()}
            notes = (*notes, *(note for one in models.values() for note in guessed_inputs(one)))
            view = view_objects(holding(models))
            layers = keras_places(models[""]) if "" in models else {}
    signatures = _signatures(result, graph, label)
    try:
        with graph.as_default():
            exported = tf.compat.v1.train.export_meta_graph(graph=graph)
    except ValueError as error:  # constants above protobuf's 2 GiB
        raise BuilderError(f"the graph of {label} cannot be written", cause=str(error)) from error
    meta_graph = protos.MetaGraphDef.FromString(exported.SerializeToString())
    for name, signature in signatures.items():
        meta_graph.signature_def[name].CopyFrom(signature)
        check_method(name, signature)
    return Built(label, meta_graph, view, layers, dict(_stored_tables(graph)), notes)


def _made(builder: Builder, kwargs: Mapping[str, Any]) -> Any:
    """Call a builder and return its result; Keras numbers its layers as if this process had made no others.

    If that makes layers' names not unique (ValueError), the builder is called again, and the numbers continue
    those of this process. Raises whatever the builder raises.
    """
    try:
        with counted_anew():
            return builder(**kwargs)
    except ValueError as error:
        if "unique" not in str(error):
            raise
    return builder(**kwargs)  # layers of the program are among its own, and have the names that it gave


def _stored_tables(graph: Any) -> Iterator[tuple[str, TableKey]]:
    """Yield (table's node, names of its keys and values in a checkpoint) of each table that a Saver stores.

    The tables are those that `graph` lists as saveable objects.
    """
    import tensorflow as tf

    for saveable in graph.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS):
        handle = getattr(getattr(saveable, "op", None), "resource_handle", None)
        names = [spec.name for spec in getattr(saveable, "specs", ())]
        if isinstance(handle, tf.Tensor) and len(names) == 2:
            yield handle.op.name, TableKey(*names)


def _signatures(result: Any, graph: Any, label: str) -> dict[str, Proto]:
    """Return {name: SignatureDef} for a builder's result, which is a tuple, or tuples by name.

    A single tuple is `serving_default`. A tuple is (inputs, outputs), both dicts of tensors by alias, with
    the method as an optional third; the tensors are to be in `graph`. `label` names the builder in messages.
    BuilderError for anything else.
    """
    if any(type(value).__name__ == "KerasTensor" for value in _values(result)):
        raise BuilderError(
            f"builder {label} returned a KerasTensor, a symbol of a Keras model without values",
            cause="expected the Keras model itself; its inputs and outputs become the signature's",
            hint="end the builder with: return keras.Model(inputs, outputs)",
        )
    named = {DEFAULT_SIGNATURE: result} if isinstance(result, tuple) else result
    if not isinstance(named, Mapping) or not named:
        raise BuilderError(f"builder {label} returned {_described(result)}", cause=_EXPECTED)
    return {name: _signature(entry, graph, f"{label}, signature {name!r}") for name, entry in named.items()}


def _values(result: Any) -> Iterator[Any]:
    """Yield the values in nested dicts, lists and tuples; any other result yields itself."""
    if isinstance(result, Mapping | list | tuple):
        for each in result.values() if isinstance(result, Mapping) else result:
            yield from _values(each)
    else:
        yield result


def _signature(entry: Any, graph: Any, where: str) -> Proto:
    if not isinstance(entry, tuple) or len(entry) not in (2, 3):
        raise BuilderError(f"builder {where}: returned {_described(entry)}", cause=_EXPECTED)
    inputs, outputs, method = (*entry, "predict")[:3]
    if method not in METHODS:
        raise BuilderError(f"builder {where}: method {method!r}", cause=f"known are {', '.join(METHODS)}")
    if not isinstance(inputs, Mapping) or not isinstance(outputs, Mapping) or not outputs:
        raise BuilderError(
            f"builder {where}: returned ({_described(inputs)}, {_described(outputs)})", cause=_EXPECTED
        )
    signature = protos.SignatureDef(method_name=METHODS[method])
    for tensors, infos in ((inputs, signature.inputs), (outputs, signature.outputs)):
        for alias, tensor in tensors.items():
            for name, part in _components(alias, tensor):
                if name in infos or (name != alias and name in tensors):
                    raise BuilderError(
                        f"builder {where}: {alias!r} is served as its components, and {name!r} is taken",
                        cause=f"it is {_described(tensor)}",
                        hint=f"rename the output {name!r}",
                    )
                infos[name].CopyFrom(_tensor_info(part, graph, f"{where}, {name!r}"))
    return signature


def _components(alias: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield (alias, tensor), or for a sparse or ragged tensor each component: `ids`, `ids_1` ..."""
    import tensorflow as tf

    # `tf.saved_model.save` gives them these names; TensorFlow Serving cannot answer with composite tensors.
    is_composite = isinstance(tensor, tf.SparseTensor | tf.RaggedTensor)
    for number, part in enumerate(
        tf.nest.flatten(tensor, expand_composites=True) if is_composite else [tensor]
    ):
        yield (f"{alias}_{number}" if number else alias), part


def _tensor_info(tensor: Any, graph: Any, where: str) -> Proto:
    """Return the TensorInfo of a dense tensor, or of a variable's value, in the builder's graph.

    `where` names the tensor in messages. A variable's read is added to the graph. BuilderError for a value
    that is neither, or is in another graph.
    """
    import tensorflow as tf

    try:
        with graph.as_default():
            symbolic = tf.convert_to_tensor(tensor)
    except (TypeError, ValueError) as error:
        raise BuilderError(
            f"builder {where}: {_described(tensor)} is not a tensor", cause=str(error)
        ) from error
    is_here = getattr(symbolic, "graph", None) is graph
    if not (is_here and isinstance(tensor, tf.Tensor | tf.Variable)):
        raise BuilderError(
            f"builder {where}: {_described(tensor)} is not a tensor of the builder's own graph",
            hint="build inside the function, and open no tf.Graph() of its own",
        )
    with graph.as_default():
        info = tf.compat.v1.saved_model.utils.build_tensor_info(symbolic)
    return protos.TensorInfo.FromString(info.SerializeToString())


def _described(value: Any) -> str:
    """Describe a value in a few words: a scalar itself, else its type, and the length of a collection."""
    kind = type(value).__name__
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value)
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list | dict) else f"a {kind}"
