"""Compare the staged bundle's answers with the source graph's, on the same inputs; and ask golden
requests.

The baseline is the graph as its author left it, nothing pruned, its variables restored by TensorFlow's own
RestoreV2 (as by a stock Saver); the candidate is the staged SavedModel in TensorFlow's own loader. Nothing of
this project computes a number here: also the reordering of `mod` tables is redone in plain numpy. Except for
dynamic tables: both graphs read the staged index, which `exporter.verify.table_index` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from exporter.checkpoint.source_shard import fetch_tensors
from exporter.errors import VerificationError
from exporter.graph.lookup_tables import files_to_feed
from exporter.graph.nodes import all_before, endpoint
from exporter.graph.outside import keep_before, require_harmless, runnable_graph, running_outside
from exporter.graph.signatures import SignatureEnds, tensor_names
from exporter.graph.source_graph import SourceGraph
from exporter.mapping.build import VariableMapping as TensorMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.storage import mirror
from exporter.storage.files import read_regular
from exporter.storage.layout import SAVED_MODEL_FILE, VARIABLES_DIRECTORY, VARIABLES_NAME
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import set_sizes
from exporter.tables.parts import PARTS
from exporter.verify.difference import Difference
from exporter.verify.golden import Answer, Gates, GoldenRequest, summary
from exporter.wire import protos
from exporter.wire.dtypes import DType, is_floating
from exporter.wire.protos import MAX_MESSAGE_BYTES, Proto
from exporter.wire.rest_json import predict_inputs

_LONGEST = 500


def require_golden(bundle: Path, requests: Sequence[GoldenRequest]) -> None:
    """Refuse a version that does not pass the golden requests by itself; it is loaded in TensorFlow.

    Raises:
        VerificationError: which requests, and why; or the version cannot be loaded.
    """
    if not requests:
        return
    failures = Gates(tuple(requests)).wrong(_ask(bundle, requests))
    if failures:
        raise VerificationError(
            "the version does not pass the golden requests",
            cause=summary(failures),
            hint="mend the model or the file of --golden; nothing was published",
        )


def _ask(bundle: Path, requests: Sequence[GoldenRequest]) -> tuple[Answer, ...]:
    import tensorflow as tf

    mirror.fetch_below(bundle)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        try:
            loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(bundle))
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise VerificationError(
                "the version cannot be loaded for --golden", cause=_text(error)
            ) from error
        return tuple(_answer_of(session, loaded.signature_def, request) for request in requests)


def _answer_of(session: Any, signatures: Any, request: GoldenRequest) -> Answer:
    import tensorflow as tf

    if request.signature_name not in signatures:
        return Answer(refused=f"there is no signature {request.signature_name!r}")
    signature = signatures[request.signature_name]
    try:
        inputs = predict_inputs(request.document, signature)
        feeds = {signature.inputs[name].name: value for name, value in inputs.items()}
        fetches = {name: tensor_names(info)[0] for name, info in signature.outputs.items()}
        found = session.run(fetches, feeds)
    except (tf.errors.OpError, ValueError) as error:
        return Answer(refused=_text(error))
    return Answer({name: np.asarray(value) for name, value in found.items()})


def _text(error: Exception) -> str:
    text = str(getattr(error, "message", error)).strip().removeprefix("Graph execution error:")
    return text.strip()[:_LONGEST]


Feeds = Mapping[str, NDArray[Any]]

# Rows of generated requests: a graph that has its training's batch baked in takes one number alone.
_BATCHES = (3, 5)
_SEED = 20_240_501


class Probe(Struct, frozen=True):
    """Inputs for one signature, by input name; `rows` of them if they were generated."""

    signature: str
    inputs: Feeds
    rows: int = 0


def compare_outputs(
    source: SourceGraph,
    mapping: TensorMapping,
    bundle: Path,
    *,
    requests: Iterable[Probe] = (),
    tolerance: float,
    traced_rows: int | None = None,
    tables: Mapping[str, TableGeometry] | None = None,
) -> tuple[Difference, ...]:
    """The difference of every output of every signature, the largest over the requests.

    Signatures without a request get generated inputs. A source that takes `traced_rows` rows and no other
    number is asked as often as it needs for a request.

    Raises:
        VerificationError: a difference above `tolerance`, an answer that is not a number, or a graph that
            cannot be run.
    """
    import tensorflow as tf

    requests = list(requests)
    signatures = source.meta_graph.signature_def
    asked = {request.signature for request in requests}
    mirror.fetch_below(bundle)
    with _reported("the staged bundle"):
        content = read_regular(bundle / SAVED_MODEL_FILE, MAX_MESSAGE_BYTES)
        served = protos.message_class("SavedModel").FromString(content).meta_graphs[0].signature_def
    for name in sorted(signatures):
        if name not in asked:
            signature = served[name] if traced_rows and name in served else signatures[name]
            batches = _BATCHES if _has_open_batch(signature) else _BATCHES[:1]
            requests += [generated(name, signature, rows) for rows in batches]
    with _reported(f"the source graph ({source.label})"):
        expected = _run_source(source, mapping, requests, traced_rows, _Tables(tables or {}, bundle))
    with _reported("the staged bundle"), tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(bundle))
        found = [_answer(session, loaded.signature_def, request, {}) for request in requests]
    differences: dict[tuple[str, str], float] = {}
    for request, left, right in zip(requests, expected, found, strict=True):
        for output, value in left.items():
            error = _difference(value, right[output], f"{request.signature}/{output}")
            key = request.signature, output
            differences[key] = max(error, differences.get(key, 0.0))
    worst = max(differences, key=lambda key: differences[key], default=None)
    if worst is not None and not differences[worst] <= tolerance:
        raise VerificationError(
            f"output {worst[1]!r} of signature {worst[0]!r} differs by {differences[worst]:.3g} from the "
            f"source graph's, the tolerance is {tolerance:.3g}",
            hint="--cast needs a larger --tolerance; otherwise look at the mapping: --dry-run --json",
        )
    return tuple(Difference(*key, error) for key, error in differences.items())


def _has_open_batch(signature: Proto) -> bool:
    """True if a request may have any number of rows, as far as the signature says."""
    shapes = [info.tensor_shape.dim for info in signature.inputs.values()]
    return any(dims and dims[0].size < 0 for dims in shapes)


def generated(name: str, signature: Proto, rows: int = _BATCHES[0]) -> Probe:
    """Inputs that fit a signature: floats in [0, 1), integers 0 and 1, empty strings.

    VerificationError for an input that is sparse, composite or of unknown rank.
    """
    random = np.random.default_rng(_SEED)
    inputs = {}
    for alias, info in sorted(signature.inputs.items()):
        if info.HasField("coo_sparse") or info.HasField("composite_tensor") or info.tensor_shape.unknown_rank:
            raise VerificationError(
                f"no values can be made up for input {alias!r} of {name!r}",
                hint="give some requests with --verify-inputs FILE",
            )
        shape = [dim.size if dim.size >= 0 else rows for dim in info.tensor_shape.dim]
        dtype = DType(info.dtype)
        if dtype is DType.STRING:
            inputs[alias] = np.full(shape, b"", dtype=object)
        elif dtype.is_integer or dtype is DType.BOOL:
            inputs[alias] = random.integers(0, 2, shape).astype(dtype.numpy)
        else:
            inputs[alias] = random.random(shape).astype(dtype.numpy)
    return Probe(name, inputs, rows)


class _Tables(Struct, frozen=True):
    """The dynamic tables of a staged bundle: their sizes by their names, and the bundle to read them from."""

    geometries: Mapping[str, TableGeometry]
    bundle: Path

    def has(self, item: TensorSource) -> bool:
        """True for a variable of such a table."""
        table, _, part = item.key.rpartition("/")
        return part in PARTS and table in self.geometries

    def size(self, source: SourceGraph, graph_def: Proto) -> None:
        """Give the source graph the tables' sizes."""
        set_sizes(graph_def, self.geometries)
        nodes = {node for table in source.dynamic_tables for node in table.nodes}
        for node in graph_def.node:
            if node.name in nodes:
                node.attr["shape"].shape.Clear()
                node.attr["shape"].shape.unknown_rank = True

    def value(self, item: TensorSource, dtype: Any) -> Any:
        """The staged value of a variable."""
        import tensorflow as tf

        (value,) = tf.raw_ops.RestoreV2(
            prefix=str(self.bundle / VARIABLES_DIRECTORY / VARIABLES_NAME),
            tensor_names=[item.key],
            shape_and_slices=[""],
            dtypes=[int(item.dtype)],
        )
        return tf.cast(value, dtype)


def _run_source(
    source: SourceGraph, mapping: TensorMapping, requests: list[Probe], rows: int | None, tables: _Tables
) -> list[Feeds]:
    import tensorflow as tf

    runnable = runnable_graph(source)
    _keep_harmless(source, mapping, runnable, requests)
    tables.size(source, runnable)
    graph_def = tf.compat.v1.GraphDef.FromString(runnable.SerializeToString())
    for node in protos.all_nodes(graph_def):
        node.device = ""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.import_graph_def(graph_def, name="")
        _restore(session, mapping, tables)
        if source.init_op:
            files = {f"{node}:0": str(path) for node, path in files_to_feed(source).items()}
            session.run(graph.get_operation_by_name(source.init_op), files)
        fixed = {f"{node}:0": value for node, value in source.feeds.items()}
        signatures = source.meta_graph.signature_def
        return [_in_parts(session, signatures, request, fixed, rows) for request in requests]


def _keep_harmless(
    source: SourceGraph, mapping: TensorMapping, runnable: Proto, requests: list[Probe]
) -> None:
    """Reduce the source graph, in place, to nodes that are run, restored or fed; refuse harmful ones."""
    from tensorflow.python.framework import op_def_registry

    def is_stateful(op: str) -> bool:
        known = op_def_registry.get(op)
        return known is not None and bool(known.is_stateful)

    nodes = {node.name: node for node in runnable.node}
    runs = all_before(nodes, [endpoint(source.init_op)] if source.init_op else [])
    others = {variable.node for item in mapping.sources for variable in item.variables}
    others |= {table.node for table in mapping.tables} | source.feeds.keys()
    for name in {request.signature for request in requests} & {*source.meta_graph.signature_def}:
        ends = SignatureEnds.of(source.meta_graph.signature_def[name])
        runs |= all_before(nodes, ends.outputs, ends.inputs)
        others |= {tensor.node for tensor in [*ends.inputs, *ends.outputs]}
    keep_before(runnable, {*runs, *others})
    found = running_outside(runnable, runs, is_stateful)
    require_harmless(found, "--verify outputs", is_allowed=source.trust.code)


def _in_parts(session: Any, signatures: Any, request: Probe, fixed: Feeds, rows: int | None) -> Feeds:
    """The answers to a request, asked in parts of `rows` rows if the graph takes no other number."""
    parts = [*_parts(request, rows)]
    answers = [_answer(session, signatures, part, fixed) for part in parts]
    if parts[0] is request:
        return answers[0]
    asked = _rows_of(request)
    return {alias: np.concatenate([answer[alias] for answer in answers])[:asked] for alias in answers[0]}


def _parts(request: Probe, rows: int | None) -> Iterator[Probe]:
    """Yield a request in parts of `rows` rows, the last filled up; as one if `rows` is None or fits."""
    asked = _rows_of(request)
    if rows is None or not asked or asked == rows:
        yield request
        return
    for start in range(0, asked, rows):
        places = np.minimum(np.arange(start, start + rows), asked - 1)
        yield replace(request, inputs={alias: value[places] for alias, value in request.inputs.items()})


def _rows_of(request: Probe) -> int:
    """The number of rows of all inputs of a request; 0 if they do not agree."""
    counts = {len(value) if np.ndim(value) else 0 for value in request.inputs.values()}
    return counts.pop() if len(counts) == 1 else 0


def _restore(session: Any, mapping: TensorMapping, tables: _Tables) -> None:
    import tensorflow as tf

    prefix = str(mapping.catalog.prefix)
    graph = session.graph
    fetch_tensors(mapping.catalog, [item.tensor for item in mapping.sources if not tables.has(item)])
    for item in mapping.sources:
        moved = _moved_rows(prefix, item) if item.gather_parts or item.scatter_parts else None
        for variable in item.variables:
            spec = variable.part
            if tables.has(item):
                value = tables.value(item, int(variable.dtype))
            elif moved is None:
                value = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=[item.tensor.name],
                    shape_and_slices=[spec.restore_spec if spec else ""],
                    dtypes=[int(item.tensor.dtype)],
                )[0]
            elif spec:
                box = zip(spec.starts, spec.lengths, strict=True)
                value = moved[tuple(slice(start, start + length) for start, length in box)]
            else:
                value = moved
            operation = graph.get_operation_by_name(variable.node)
            if operation.type == "VarHandleOp":
                assign = tf.raw_ops.AssignVariableOp(resource=operation.outputs[0], value=value)
            else:
                assign = tf.raw_ops.Assign(ref=operation.outputs[0], value=value).op
            session.run(assign)
    for table in mapping.tables:
        keys, values = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[table.keys, table.values],
            shape_and_slices=["", ""],
            dtypes=[int(table.key_dtype), int(table.value_dtype)],
        )
        handle = graph.get_operation_by_name(table.node).outputs[0]
        session.run(tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=keys, values=values))


def _moved_rows(prefix: str, item: TensorSource) -> NDArray[Any]:
    """The table as the graph looks it up, from the whole tensor as TensorFlow joins its slices."""
    import tensorflow as tf

    rows = tf.train.load_checkpoint(prefix).get_tensor(item.tensor.name)
    if item.gather_parts:
        ordered, start = np.empty_like(rows), 0
        for part in range(item.gather_parts):
            length = len(ordered[part :: item.gather_parts])
            ordered[part :: item.gather_parts] = rows[start : start + length]
            start += length
        rows = ordered
    if item.scatter_parts:
        rows = np.concatenate([rows[part :: item.scatter_parts] for part in range(item.scatter_parts)])
    return np.asarray(rows)


def _answer(session: Any, signatures: Any, request: Probe, fixed: Feeds) -> Feeds:
    import tensorflow as tf

    if request.signature not in signatures:
        raise VerificationError(
            f"there is no signature {request.signature!r}; there are {sorted(signatures)}"
        )
    signature = signatures[request.signature]
    feeds = {signature.inputs[alias].name: value for alias, value in request.inputs.items()}
    fetches = {alias: tensor_names(info)[0] for alias, info in signature.outputs.items()}
    try:
        answers: Feeds = session.run(fetches, {**feeds, **fixed})
    except tf.errors.InvalidArgumentError as error:
        if not request.rows or not any(word in error.message.lower() for word in ("shape", "dimension")):
            raise
        raise VerificationError(
            f"signature {request.signature!r} does not answer {request.rows} rows, though its inputs say [?]",
            cause=_text(error),
            hint="the batch size of its input_fn is probably baked in: write the .meta of a graph of any "
            "batch, use a builder, or give requests of the one size with --verify-inputs FILE",
        ) from error
    return answers


def _difference(expected: Any, found: Any, where: str) -> float:
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise VerificationError(
            f"{where}: the source graph gives {expected.dtype}{list(expected.shape)}, "
            f"the bundle {found.dtype}{list(found.shape)}"
        )
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind != "c" and not is_floating(expected):
        return 0.0 if np.array_equal(expected, found) else float("inf")
    left, right = (value.astype(np.complex128) for value in (expected, found))
    if np.isnan(right).any():
        raise VerificationError(
            f"{where} is not a number for some inputs",
            cause="a graph with dropout gives this if its keep_prob is fed nothing",
            hint="freeze such placeholders: --feed keep_prob=1.0; or give real inputs: --verify-inputs FILE",
        )
    return float(np.max(np.abs(left - right) / np.maximum(1.0, np.abs(left))))


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Raise TensorFlow's errors as a VerificationError that says which of the two graphs failed."""
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, ValueError, TypeError, KeyError) as error:
        raise VerificationError(
            f"{what} could not be run for --verify outputs",
            cause=_text(error),
            hint="give inputs that it accepts with --verify-inputs FILE, or use --verify bytes",
        ) from error
