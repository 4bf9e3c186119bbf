"""Compare the staged bundle's answers with the source graph's, for the same inputs; and ask golden requests.

The baseline is the graph as its author left it, nothing pruned, its variables restored by TensorFlow's own
RestoreV2 (as by a stock Saver); the candidate is the staged SavedModel in TensorFlow's own loader. No code of
this project computes a number here: the reordering of `mod` tables, too, is repeated in plain numpy. The
exception are dynamic tables: both graphs read the staged index, which `exporter.verify.table_index` checks.
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

from exporter.catalog import SliceSpec
from exporter.checkpoint.source_shard import fetch_tensors
from exporter.errors import VerificationError
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.lookup_tables import files_to_feed
from exporter.graph.nodes import Body, all_before, base_dtype, constant, endpoint, free_name
from exporter.graph.outside import keep_before, require_harmless, runnable_graph, running_outside
from exporter.graph.session import GraphSession, RunFailed, graph_session, session_here
from exporter.graph.signatures import SignatureEnds, tensor_names
from exporter.graph.source_graph import SourceGraph
from exporter.limited.worker import Ended, NotStarted
from exporter.mapping.build import VariableMapping as TensorMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.storage import mirror
from exporter.storage.files import read_regular
from exporter.storage.layout import SAVED_MODEL_FILE, VARIABLES_DIRECTORY, VARIABLES_NAME
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import set_sizes
from exporter.tables.parts import PARTS
from exporter.terminal.tensorflow_import import require_tensorflow
from exporter.verify.golden import Answer, Gates, GoldenRequest, summary
from exporter.wire import protos
from exporter.wire.dtypes import DType, is_floating
from exporter.wire.protos import MAX_MESSAGE_BYTES, Proto
from exporter.wire.rest_json import predict_inputs


def require_golden(bundle: Path, requests: Sequence[GoldenRequest], running: Running) -> None:
    """Raise VerificationError unless a staged version passes all golden requests, if there are any.

    `bundle` is the version's directory, fetched if it is of a store. TensorFlow loads and runs it with the
    limits of `running`, which this waits for. Without requests nothing is done.

    Raises:
        VerificationError: a request fails (the cause says which, and why), the version cannot be loaded,
            or TensorFlow's process cannot start or ends.
        TensorFlowNeeded: no supported TensorFlow is installed.
        CheckpointError, DiskFull, PublishError: a file of a version in a store cannot be fetched.
    """
    if not requests:
        return
    mirror.fetch_below(bundle)
    with running.session("the version", "--golden") as session:
        try:
            signatures = session.load(bundle).signature_def
        except RunFailed as error:
            raise VerificationError("the version cannot be loaded for --golden", cause=str(error)) from error
        answers = tuple(_golden_answer(session, signatures, request) for request in requests)
    if failures := Gates(tuple(requests)).wrong(answers):
        raise VerificationError(
            "the version does not pass the golden requests",
            cause=summary(failures),
            hint="mend the model or the file of --golden; nothing was published",
        )


def _golden_answer(session: GraphSession, signatures: Any, request: GoldenRequest) -> Answer:
    if request.signature_name not in signatures:
        return Answer(refused=f"there is no signature {request.signature_name!r}")
    signature = signatures[request.signature_name]
    names = [*signature.outputs]
    try:
        inputs = predict_inputs(request.document, signature)
        feeds = {signature.inputs[name].name: value for name, value in inputs.items()}
        found = session.run([tensor_names(signature.outputs[name])[0] for name in names], feeds)
    except (RunFailed, ValueError) as error:
        return Answer(refused=str(error))
    return Answer(dict(zip(names, found, strict=True)))


class Running(Struct, frozen=True):
    """Limits for graphs that TensorFlow runs in a process of their own; `trusted` graphs run in this one.

    `value_bytes` is the size of the graphs' values: the more, the more memory the process may use. Each run
    may compute for `cpu_seconds` and take `step_seconds` of wall time. Runs in this process have no limits.
    """

    value_bytes: int = 0
    trusted: bool = False
    cpu_seconds: int = 300
    step_seconds: float = 300.0

    @contextmanager
    def session(self, what: str, option: str) -> Iterator[GraphSession]:
        """Yield a session of TensorFlow, in a limited process, or in this one if the graphs are `trusted`.

        `what` names the graph in errors, `option` the option that asks for the run.

        Raises:
            TensorFlowNeeded: no supported TensorFlow is installed.
            VerificationError: the process cannot start, or, in the block, a run does not end or ends its
                process.
            RunFailed: TensorFlow reports an error in the block.
        """
        require_tensorflow(option)
        if self.trusted:  # it may call Python functions, or operations that were loaded here
            with session_here() as session:
                yield session
            return
        memory = _MEMORY_BYTES + _MEMORY_FACTOR * self.value_bytes
        try:
            with graph_session(
                memory_bytes=memory, cpu_seconds=self.cpu_seconds, step_seconds=self.step_seconds
            ) as session:
                yield session
        except NotStarted as error:
            raise VerificationError(f"{what} cannot be run for {option}", cause=str(error)) from None
        except Ended as ended:
            reason = (
                f"it came to no end in {ended.limit}" if ended.limit else f"its process ended {ended.how}"
            )
            if ended.refusal:
                reason = ended.refusal["cause"] or ended.refusal["message"].strip()
            raise VerificationError(
                f"{what} could not be run for {option}",
                cause=reason,
                hint="look for a loop without end in its graph, or for operations that wait; without "
                f"{option} nothing is run",
            ) from None


_MEMORY_BYTES, _MEMORY_FACTOR = 4 << 30, 4  # beyond TensorFlow's own needs: for the values, and answers
Feeds = Mapping[str, NDArray[Any]]

# Rows of generated requests: two numbers, as a graph with a fixed batch size accepts only one.
_BATCHES = (3, 5)
_SEED = 20_240_501  # any number, but the same: a difference must show again


class Probe(Struct, frozen=True):
    """Inputs for one signature, by input name.

    `rows` is their number of rows if they were generated, else 0.
    """

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
    running: Running,
) -> tuple[Difference, ...]:
    """Run source graph and staged bundle; return the largest difference of each output of each signature.

    `mapping` says which values of the checkpoint the source's variables get; `bundle` is the staged
    directory. Each signature without a request gets generated inputs. A source that accepts only
    `traced_rows` rows is asked several times for a request (None: it accepts any number). `tables` are the
    sizes of dynamic tables by name; the source reads these from the bundle. `tolerance` is the greatest
    permitted difference. A difference is relative: see `Difference`. `running` limits the two runs, which
    this waits for.

    Raises:
        VerificationError: a difference is above `tolerance`, an answer has another shape or type or is
            not a number, no input can be made up for a signature, or a graph cannot be run.
        AccessRefused: the source graph does more than compute and read, and its code is not trusted; or
            it may not read a file.
        NotServable: a function of the source graph calls itself, or functions nest too deeply.
        GraphError: the source graph is damaged: it lacks a function, say, or has two nodes of one name;
            MissingAsset if a file that it reads cannot be looked up.
        TensorFlowNeeded: no supported TensorFlow is installed.
        CheckpointError, OSError: a file of the checkpoint or bundle cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    requests = list(requests)
    signatures = source.meta_graph.signature_def
    asked = {request.signature for request in requests}
    mirror.fetch_below(bundle)
    with _reported("the staged bundle"):
        content = read_regular(bundle / SAVED_MODEL_FILE, MAX_MESSAGE_BYTES)
        served = protos.message_class("SavedModel").FromString(content).meta_graphs[0].signature_def
    for name in sorted(signatures):
        if name not in asked:
            # an opened batch shows in the staged signature alone: the source's has the traced number
            signature = served[name] if traced_rows and name in served else signatures[name]
            batches = _BATCHES if _has_open_batch(signature) else _BATCHES[:1]
            if traced_rows and _has_open_batch(signature):  # an experiment made its batch size variable
                # also the traced number, and more than two parts of it, the last of which is padded
                batches = (1, *batches, traced_rows, 2 * traced_rows + 1)
            requests += [generated(name, signature, rows) for rows in batches]
    option = "--verify outputs"
    original = f"the source graph ({source.label})"
    # one after the other, each in a session of its own: both at once would need memory for two sets of values
    with running.session(original, option) as session, _reported(original):
        expected = _run_source(session, source, mapping, requests, traced_rows, _Tables(tables or {}, bundle))
    with running.session("the staged bundle", option) as session, _reported("the staged bundle"):
        loaded = session.load(bundle).signature_def
        found = [_answer(session, loaded, request, {}) for request in requests]
    differences: dict[tuple[str, str], float] = {}
    for request, left, right in zip(requests, expected, found, strict=True):
        for output, value in left.items():
            error = _difference(value, right[output], f"{request.signature}/{output}")
            key = request.signature, output
            differences[key] = max(error, differences.get(key, 0.0))
    worst = max(differences, key=lambda key: differences[key], default=None)
    if worst is not None and differences[worst] > tolerance:
        raise VerificationError(
            f"output {worst[1]!r} of signature {worst[0]!r} differs by {differences[worst]:.3g} from the "
            f"source graph's, the tolerance is {tolerance:.3g}",
            hint="--cast needs a larger --tolerance; otherwise look at the mapping: --dry-run --json",
        )
    return tuple(Difference(*key, error) for key, error in differences.items())


def _has_open_batch(signature: Proto) -> bool:
    """True if an input of the signature has an unknown first dimension, the number of rows of a request."""
    shapes = [info.tensor_shape.dim for info in signature.inputs.values()]
    return any(dims and dims[0].size < 0 for dims in shapes)


def generated(name: str, signature: Proto, rows: int = _BATCHES[0]) -> Probe:
    """Return generated inputs for the signature called `name`, the same for each call.

    Floats are in [0, 1), integers and booleans 0 or 1, strings empty; each unknown dimension gets `rows`.

    Raises:
        VerificationError: an input is sparse, composite or of unknown rank.
        GraphError: the number of an input's data type is unknown.
    """
    random = np.random.default_rng(_SEED)
    inputs = {}
    for alias, info in sorted(signature.inputs.items()):
        if info.HasField("coo_sparse") or info.HasField("composite_tensor") or info.tensor_shape.unknown_rank:
            raise VerificationError(
                f"no values can be made up for input {alias!r} of {name!r}",
                hint="give some requests with --requests FILE",
            )
        shape = [dim.size if dim.size >= 0 else rows for dim in info.tensor_shape.dim]
        dtype = base_dtype(info.dtype)
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
        """True if a variable is part of one of these tables: its key is `<table>/<part>`."""
        table, _, part = item.key.rpartition("/")
        return part in PARTS and table in self.geometries

    def size(self, source: SourceGraph, graph_def: Proto) -> None:
        """Set the tables' sizes in `graph_def`, in place, and clear the shapes of their variables.

        `graph_def` is a copy of the graph of `source`. Raises GraphError if a constant of the graph is
        damaged.
        """
        set_sizes(graph_def, self.geometries)
        nodes = {node for table in source.dynamic_tables for node in table.nodes}
        for node in graph_def.node:
            if node.name in nodes:
                node.attr["shape"].shape.Clear()
                node.attr["shape"].shape.unknown_rank = True

    @property
    def prefix(self) -> str:
        """The prefix of the bundle's own tensors."""
        return str(self.bundle / VARIABLES_DIRECTORY / VARIABLES_NAME)


def _run_source(
    session: GraphSession,
    source: SourceGraph,
    mapping: TensorMapping,
    requests: list[Probe],
    rows: int | None,
    tables: _Tables,
) -> list[Feeds]:
    runnable = runnable_graph(source)
    # first: it removes nodes that no output needs, and those that restore are such
    _keep_harmless(session, source, mapping, runnable, requests)
    tables.size(source, runnable)
    for node in protos.all_nodes(runnable):
        # a trainer's devices (parameter servers, GPUs) do not exist here
        node.device = ""
    restoring = _Restoring(Body(runnable.node), mapping, tables)
    # TensorFlow opens the shards itself, and finds holes in files of a mirror that were not fetched
    fetch_tensors(mapping.catalog, [item.tensor for item in mapping.sources if not tables.has(item)])
    # all nodes before `open`, which sends the graph
    steps = [*restoring.add()]
    session.open(runnable)
    for target, feeds in steps:
        # one variable at a time is in memory twice; a large one may take longer than a step of the graph
        session.run([], feeds, [target], limited=False)
    if source.init_op:
        files = {f"{n}:0": np.array(str(path).encode(), object) for n, path in files_to_feed(source).items()}
        session.run([], files, [source.init_op])
    fixed = {f"{node}:0": value for node, value in source.feeds.items()}
    signatures = source.meta_graph.signature_def
    return [_in_parts(session, signatures, request, fixed, rows) for request in requests]


def _keep_harmless(
    session: GraphSession,
    source: SourceGraph,
    mapping: TensorMapping,
    runnable: Proto,
    requests: list[Probe],
) -> None:
    """Remove all nodes from `runnable` except those to be run, restored or fed, and refuse harmful ones.

    Run are the nodes before the outputs of the signatures that `requests` name, and before the init op;
    restored are the variables and lookup tables of `mapping`. Raises AccessRefused if a node that runs does
    more than compute and read, unless the source's code is trusted; NotServable if a function calls itself or
    functions nest too deeply; GraphError if the graph lacks a called function; Ended if TensorFlow's process
    ends.
    """
    stateful = session.stateful(node.op for node in protos.all_nodes(runnable))
    nodes = {node.name: node for node in runnable.node}
    runs = all_before(nodes, [endpoint(source.init_op)] if source.init_op else [])
    others = {variable.node for item in mapping.sources for variable in item.variables}
    others |= {table.node for table in mapping.tables} | source.feeds.keys()
    for name in {request.signature for request in requests} & {*source.meta_graph.signature_def}:
        ends = SignatureEnds.of(source.meta_graph.signature_def[name])
        runs |= all_before(nodes, ends.outputs, ends.inputs)
        others |= {tensor.node for tensor in [*ends.inputs, *ends.outputs]}
    keep_before(runnable, {*runs, *others})
    found = running_outside(runnable, runs, stateful.__contains__)
    require_harmless(found, "--verify outputs", is_allowed=source.trust.code)


def _in_parts(
    session: GraphSession, signatures: Any, request: Probe, fixed: Feeds, rows: int | None
) -> Feeds:
    """Return the answer to a request by output name, asked in parts of exactly `rows` rows.

    With `rows` None, or if it has `rows` rows or its inputs differ in rows, the request is asked whole. The
    last part is padded; its surplus answers are cut off. `fixed` is fed besides the request. Raises RunFailed
    if TensorFlow refuses, Ended if its process ends, VerificationError for a signature that does not exist or
    a fixed batch size.
    """
    parts = [*_parts(request, rows)]
    answers = [_answer(session, signatures, part, fixed) for part in parts]
    if parts[0] is request:
        return answers[0]
    asked = _rows_of(request)
    return {alias: np.concatenate([answer[alias] for answer in answers])[:asked] for alias in answers[0]}


def _parts(request: Probe, rows: int | None) -> Iterator[Probe]:
    """Yield a request in parts of exactly `rows` rows, the last padded with the request's last row.

    The request itself is yielded if `rows` is None or equals its number of rows, or if its inputs differ in
    rows.
    """
    asked = _rows_of(request)
    if rows is None or not asked or asked == rows:
        yield request
        return
    for start in range(0, asked, rows):
        places = np.minimum(np.arange(start, start + rows), asked - 1)
        yield replace(request, inputs={alias: value[places] for alias, value in request.inputs.items()})


def _rows_of(request: Probe) -> int:
    """Return the number of rows of a request's inputs; 0 if they differ or there are none."""
    counts = {len(value) if np.ndim(value) else 0 for value in request.inputs.values()}
    return counts.pop() if len(counts) == 1 else 0


class _Restoring(Struct, frozen=True):
    """Adds operations to a graph by which TensorFlow's own RestoreV2 sets its values."""

    body: Body
    mapping: TensorMapping
    tables: _Tables

    def add(self) -> Iterator[tuple[str, Feeds]]:
        """Add restoring operations to the graph; yield the name of each one to run, in order, and its feeds.

        Exhaust it before the graph is opened. Feeds are values by tensor name. Variables of the mapping are
        assigned first, then lookup tables are filled.
        """
        prefix = str(self.mapping.catalog.prefix)
        for item in self.mapping.sources:
            for variable in item.variables:
                yield self._assignment(item, variable, prefix)
        for table in self.mapping.tables:
            dtypes = (table.key_dtype, table.value_dtype)
            keys, values = self._restored(prefix, [table.keys, table.values], ["", ""], dtypes)
            handle = self.body.output(self.body.by_name[table.node], 0)
            attrs: dict[str, Any] = {"Tin": table.key_dtype, "Tout": table.value_dtype}
            yield (
                self.body.add("verify/import", "LookupTableImportV2", handle, keys, values, **attrs).name,
                {},
            )

    def _assignment(self, item: TensorSource, variable: GraphVariable, prefix: str) -> tuple[str, Feeds]:
        is_table, is_moved = self.tables.has(item), bool(item.gather_parts or item.scatter_parts)
        part, dtype = variable.part, item.dtype if is_table else item.tensor.dtype
        name = item.key if is_table else item.tensor.name
        # whole tables where rows move: those of one part come from all over the table
        spec = part.restore_spec if part and not (is_table or is_moved) else ""
        (value,) = self._restored(self.tables.prefix if is_table else prefix, [name], [spec], [dtype])
        feeds: dict[str, NDArray[Any]] = {}
        if is_table and dtype is not variable.dtype:
            cast = self.body.add("verify/cast", "Cast", value, SrcT=dtype, DstT=variable.dtype)
            value, dtype = self.body.single(cast, "y"), variable.dtype
        if is_moved and not is_table:
            value, feeds = self._moved(value, item, part, dtype)
        node = self.body.by_name[variable.node]
        target = self.body.output(node, 0)
        # graphs of TensorFlow 1 may have variables of either kind
        if node.op == "VarHandleOp":
            assign = self.body.add("verify/assign", "AssignVariableOp", target, value, dtype=dtype)
        else:
            assign = self.body.add("verify/assign", "Assign", target, value, T=dtype)
        return assign.name, feeds

    def _moved(
        self, value: str, item: TensorSource, part: SliceSpec | None, dtype: DType
    ) -> tuple[str, dict[str, NDArray[Any]]]:
        """Add nodes that put a restored table's rows in the order of the graph's lookups.

        Return the tensor of the rows in this order, and the feeds: by tensor name, the row numbers of the
        order. `value` is the tensor with the rows as stored, `part` the slice of the table that the variable
        has, None for all of it.
        """
        order = _moved_rows(np.arange(item.tensor.shape[0]), item)
        if part:
            order = order[part.starts[0] : part.starts[0] + part.lengths[0]]
        rows = self.body.add("verify/order", "Placeholder", dtype=DType.INT64)
        axis = self._constant(np.array(0, np.int32), DType.INT32)
        attrs: dict[str, Any] = {"Tparams": dtype, "Tindices": DType.INT64, "Taxis": DType.INT32}
        found = self.body.add("verify/moved", "GatherV2", value, rows.name, axis, **attrs).name
        if part and len(part.starts) > 1:
            ends = [
                self._constant(np.array((first, *numbers[1:]), np.int64), DType.INT64)
                for first, numbers in ((0, part.starts), (len(order), part.lengths))
            ]
            found = self.body.add("verify/part", "Slice", found, *ends, T=dtype, Index=DType.INT64).name
        return found, {f"{rows.name}:0": order.astype(np.int64)}

    def _restored(
        self, prefix: str, names: Sequence[str], specs: Sequence[str], dtypes: Sequence[DType]
    ) -> list[str]:
        texts = [np.array(prefix.encode(), object), *(_texts(each) for each in (names, specs))]
        inputs = [self._constant(text, DType.STRING) for text in texts]
        node = self.body.add("verify/restore", "RestoreV2", *inputs, dtypes=tuple(dtypes))
        return [self.body.output(node, at) for at in range(len(names))]

    def _constant(self, value: NDArray[Any], dtype: DType) -> str:
        name = free_name(self.body.by_name, "verify/constant")
        return str(self.body.put(constant(name, value, dtype)).name)


def _texts(texts: Sequence[str]) -> NDArray[Any]:
    return np.array([text.encode() for text in texts], object)


def _moved_rows(rows: NDArray[Any], item: TensorSource) -> NDArray[Any]:
    """Return `rows`, which are all rows of a table as stored, in the order of the graph's lookups.

    Rows that are distributed in turn over parts (`mod`) are first gathered from, then scattered to, as many
    parts as `item` says.
    """
    if item.gather_parts:
        ordered, start = np.empty_like(rows), 0
        for part in range(item.gather_parts):
            length = len(ordered[part :: item.gather_parts])
            ordered[part :: item.gather_parts] = rows[start : start + length]
            start += length
        rows = ordered
    if item.scatter_parts:
        rows = np.concatenate([rows[part :: item.scatter_parts] for part in range(item.scatter_parts)])
    return rows


def _answer(session: GraphSession, signatures: Any, request: Probe, fixed: Feeds) -> Feeds:
    if request.signature not in signatures:
        raise VerificationError(
            f"there is no signature {request.signature!r}; there are {sorted(signatures)}"
        )
    signature = signatures[request.signature]
    feeds = {signature.inputs[alias].name: value for alias, value in request.inputs.items()}
    names = [*signature.outputs]
    try:
        found = session.run([tensor_names(signature.outputs[n])[0] for n in names], {**feeds, **fixed})
    except RunFailed as error:
        is_shape = any(word in str(error).lower() for word in ("shape", "dimension"))
        if not request.rows or error.kind != "InvalidArgumentError" or not is_shape:
            raise
        raise VerificationError(
            f"signature {request.signature!r} does not answer {request.rows} rows, though its inputs say [?]",
            cause=str(error),
            hint="the batch size of its input_fn is probably baked in: write the .meta of a graph of any "
            "batch, use a builder, or give requests of the one size with --requests FILE",
        ) from error
    return dict(zip(names, found, strict=True))


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
    # which holds the values of all floating-point and complex types exactly
    left, right = (value.astype(np.complex128) for value in (expected, found))
    if np.isnan(right).any():
        raise VerificationError(
            f"{where} is not a number for some inputs",
            cause="a graph with dropout gives this if its keep_prob is fed nothing",
            hint="freeze such placeholders: --feed keep_prob=1.0; or give real inputs: --requests FILE",
        )
    with np.errstate(invalid="ignore"):  # inf - inf
        error = np.where(left == right, 0.0, np.abs(left - right) / np.maximum(1.0, np.abs(left)))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))  # as `max` passes over NaN


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Convert the block's errors of TensorFlow to a VerificationError about a graph, named by `what`.

    RunFailed, ValueError, TypeError and KeyError are converted; others pass.
    """
    try:
        yield
    except (RunFailed, ValueError, TypeError, KeyError) as error:
        raise VerificationError(
            f"{what} could not be run for --verify outputs",
            cause=str(error),
            hint="give inputs that it accepts with --requests FILE, or use --verify bytes",
        ) from error


class Difference(Struct, frozen=True):
    """The largest difference found in one output: |a - b| / max(1, |a|); for other types 0 or infinity."""

    signature: str
    output: str
    max_error: float
