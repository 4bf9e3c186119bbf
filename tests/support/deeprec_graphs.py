"""Write MetaGraphDefs and SavedModels as DeepRec's Python writes them, without DeepRec.

Stock TensorFlow builds the model with stand-ins: a VarHandleOp for each part of an embedding variable and a
ResourceGather for each lookup. What it exports is then changed on the proto level to the nodes, attributes,
collections and unknown fields that DeepRec's sources write. Each function names the source that it follows,
below DeepRec's `tensorflow/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.graph.nodes import shape_proto
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill

RANDOM = "random"
_INCR_SAVER_DEF = 8
"""The number of DeepRec's field of a MetaGraphDef that stock protobuf does not know."""
_IS_EMBEDDING_VAR = b"\xd8\x05\x01"
"""Field 91 of a VariableDef, a varint, with the value true."""


class Generation(IntEnum):
    """How a graph initialises and restores embedding variables."""

    FIRST = 1
    """`InitializeKvVariableOp` and `KvResourceImportV2` (python/ops/kv_variable_ops.py until 2302)."""
    SECOND = 2
    """`InitializeKvVariableV2Op` twice, wrapped in NoOps, and `KvResourceImportV3` (from 2304)."""


class EmbeddingVariable(Struct, eq=False):
    """What `tf.get_embedding_variable` is told, and the stand-ins of its parts.

    `initializer` is `RANDOM`, a number for `tf.constant_initializer`, or an array: `default_value_dim` rows.
    """

    name: str
    dim: int
    parts: int = 0
    key_dtype: DType = DType.INT64
    dtype: DType = DType.FLOAT
    filter_freq: int = 0
    initializer: Any = RANDOM
    default_value_dim: int = 4096
    default_value_no_permission: float = 0.0
    block_num: int = 1
    handles: list[Any] = field(default_factory=list)

    @property
    def part_names(self) -> list[str]:
        """The names of its handles (python/ops/variable_scope.py, _get_partitioned_variable)."""
        return [f"{self.name}/part_{number}" for number in range(self.parts)] if self.parts else [self.name]


class _Gather(Struct):
    """What a stand-in's ResourceGather is to become."""

    variable: EmbeddingVariable
    default_value: str
    uses_default: bool
    counts: str = ""


class DeepRecGraph:
    """The default graph of a program that is written for DeepRec. Use inside of `deeprec_graph()`."""

    def __init__(self, graph: Any, generation: Generation) -> None:
        self.graph = graph
        self.generation = generation
        self.variables: list[EmbeddingVariable] = []
        self.gathers: dict[str, _Gather] = {}
        self.saver: Any = None

    def embedding_variable(self, name: str, dim: int, **options: Any) -> EmbeddingVariable:
        """`tf.get_embedding_variable(name, dim, partitioner=..., ev_option=...)`."""
        import tensorflow as tf

        made = EmbeddingVariable(name, dim, **options)
        for part in made.part_names:
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.as_dtype(int(made.dtype)), shape=[None, dim], shared_name=part, name=part
            )
            made.handles.append(handle)
        self.variables.append(made)
        return made

    def _sparse_read(
        self, variable: EmbeddingVariable, part: int, ids: Any, init_value: Any, counts: Any
    ) -> Any:
        """EmbeddingVariable.sparse_read (python/ops/kv_variable_ops.py)."""
        import tensorflow as tf

        v1 = tf.compat.v1
        dtype = tf.as_dtype(int(variable.dtype))
        with v1.name_scope("Gather"):
            default = tf.constant(1.0, dtype) if init_value is None else init_value
            value = tf.raw_ops.ResourceGather(
                resource=variable.handles[part], indices=ids, dtype=dtype, name="Gather"
            )
        self.gathers[value.op.name] = _Gather(
            variable, default.name, init_value is not None, "" if counts is None else counts.name
        )
        return tf.identity(value)

    def embedding_lookup(
        self,
        variable: EmbeddingVariable,
        ids: Any,
        *,
        ev_init_value: Any = None,
        counts: Any = None,
        name: str | None = None,
    ) -> Any:
        """_embedding_lookup_and_transform (python/ops/embedding_ops.py) for embedding variables.

        Many parts: `p_assignments = flat_ids % 1000 % np`. The counts are not partitioned.
        """
        import tensorflow as tf

        v1 = tf.compat.v1
        count = len(variable.handles)
        with v1.name_scope(name, "embedding_lookup"):
            if count == 1:
                return tf.identity(self._sparse_read(variable, 0, ids, ev_init_value, counts))
            flat_ids = tf.reshape(ids, [-1])
            original_indices = tf.range(tf.size(flat_ids))
            assignments = tf.cast(flat_ids % 1000 % count, tf.int32)
            gather_ids = tf.dynamic_partition(flat_ids, assignments, count)
            init_values: Sequence[Any] = [None] * count
            if ev_init_value is not None:
                init_values = tf.dynamic_partition(ev_init_value, assignments, count)
            indices = tf.dynamic_partition(original_indices, assignments, count)
            results = [
                self._sparse_read(variable, part, gather_ids[part], init_values[part], counts)
                for part in range(count)
            ]
            stitched = tf.raw_ops.ParallelDynamicStitch(indices=indices, data=results)
            return tf.reshape(stitched, tf.concat([tf.shape(ids), [variable.dim]], 0))

    def embedding_lookup_sparse(
        self,
        variable: EmbeddingVariable,
        sp_ids: Any,
        sp_weights: Any = None,
        *,
        combiner: str = "mean",
        name: str | None = None,
    ) -> Any:
        """embedding_lookup_sparse (python/ops/embedding_ops.py), its branch for weights and that without."""
        import tensorflow as tf

        v1 = tf.compat.v1
        with v1.name_scope(name, "embedding_lookup_sparse"):
            segment_ids = tf.cast(sp_ids.indices[:, 0], tf.int32)
            counts = None
            if variable.filter_freq > 0:
                ids, index, counts = tf.unique_with_counts(sp_ids.values)
            else:
                ids, index = tf.unique(sp_ids.values)
            embeddings = self.embedding_lookup(variable, ids, counts=counts)
            if sp_weights is None:
                combine = {
                    "sum": v1.sparse_segment_sum,
                    "mean": v1.sparse_segment_mean,
                    "sqrtn": v1.sparse_segment_sqrt_n,
                }
                return combine[combiner](embeddings, index, segment_ids)
            weights = tf.reshape(sp_weights.values, [-1, 1])
            total = tf.math.segment_sum(tf.gather(embeddings, index) * weights, segment_ids)
            if combiner == "sum":
                return total
            if combiner == "mean":
                return total / tf.math.segment_sum(weights, segment_ids)
            return total / tf.sqrt(tf.math.segment_sum(tf.pow(weights, 2), segment_ids))

    def meta_graph(self, optimizer: str = "Adagrad") -> Proto:
        """The MetaGraphDef that `tf.train.Saver(sharded=True)` exports beside a checkpoint.

        Slots of `optimizer` stand beside every embedding variable; "" for none.
        """
        import tensorflow as tf

        v1 = tf.compat.v1
        with self.graph.as_default():
            step = v1.train.get_or_create_global_step()
            del step
            if self.saver is None:
                self.saver = v1.train.Saver(sharded=False)
            exported = v1.train.export_meta_graph(graph=self.graph, saver_def=self.saver.as_saver_def())
        meta_graph = protos.MetaGraphDef.FromString(exported.SerializeToString())
        _DeepRecNodes(meta_graph, self, optimizer).write()
        return _with_incr_saver(meta_graph)

    def save_meta(self, path: Path, optimizer: str = "Adagrad") -> Path:
        """Write `meta_graph()` to a `.meta` file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.meta_graph(optimizer).SerializeToString())
        return path

    def saved_model(
        self, directory: Path, inputs: dict[str, Any], outputs: dict[str, Any], *, tag: str = "serve"
    ) -> Path:
        """Write what `tf.saved_model.simple_save` leaves, without variables: the whole graph, a signature."""
        import tensorflow as tf

        v1 = tf.compat.v1
        meta_graph = self.meta_graph()
        meta_graph.meta_info_def.tags.append(tag)
        with self.graph.as_default():
            signature = v1.saved_model.predict_signature_def(inputs, outputs)
        meta_graph.signature_def["serving_default"].CopyFrom(
            protos.SignatureDef.FromString(signature.SerializeToString())
        )
        model = protos.SavedModel(saved_model_schema_version=1)
        model.meta_graphs.append(meta_graph)
        directory.mkdir(parents=True)
        (directory / "saved_model.pb").write_bytes(model.SerializeToString())
        return directory


@contextmanager
def deeprec_graph(generation: Generation = Generation.SECOND) -> Iterator[DeepRecGraph]:
    """A fresh default graph; ordinary variables in it are reference variables, as in DeepRec."""
    from tests.support.graph_runs import v1_graph

    with v1_graph(resource=False) as graph:
        yield DeepRecGraph(graph, generation)


class _DeepRecNodes:
    """Turns stand-ins into DeepRec's nodes, and adds what belongs to a training graph."""

    def __init__(self, meta_graph: Proto, program: DeepRecGraph, optimizer: str) -> None:
        self.meta_graph = meta_graph
        self.program = program
        self.optimizer = optimizer
        self.nodes = {node.name: node for node in meta_graph.graph_def.node}

    def write(self) -> None:
        restores: list[str] = []
        saved: list[tuple[str, DType]] = []
        for variable in self.program.variables:
            for number, name in enumerate(variable.part_names):
                self._handle(variable, self.nodes[name])
                self._initialise(variable, name, name, 0)
                restores.append(self._import(variable, name, number))
                saved.append((name, variable.key_dtype))
                self._collect(variable, name, number)
                if self.optimizer:
                    slot = f"{name}/{self.optimizer}"
                    self._handle(variable, self._add(slot, "VarHandleOp"), slot)
                    self._initialise(variable, slot, name, 1)
                    restores.append(self._import(variable, slot, number))
                    saved.append((slot, variable.key_dtype))
        for name, gather in self.program.gathers.items():
            self._gather(name, gather)
        self._save(saved)
        self._restore(restores)
        self._describe()

    def _describe(self) -> None:
        """The OpDefs that a MetaGraphDef carries, of DeepRec's own operations and of its SaveV2."""
        described = self.meta_graph.meta_info_def.stripped_op_list.op
        used = {node.op for node in self.meta_graph.graph_def.node}
        for op, (inputs, outputs) in _OP_DEFS.items():
            if op not in used:
                continue
            made = described.add(name=op, is_stateful=op == "KvVarHandleOp")
            for arguments, texts in ((made.input_arg, inputs), (made.output_arg, outputs)):
                for name, kind in (text.split(":") for text in texts.split()):
                    fixed = {"resource": DType.RESOURCE, "bool": DType.BOOL, "string": DType.STRING}.get(kind)
                    arguments.add(name=name, **({"type": int(fixed)} if fixed else {"type_attr": kind}))
            for name in sorted({name for node in self._of(op) for name in node.attr if name[0] != "_"}):
                made.attr.add(name=name, type=_KINDS[next(self._of(op)).attr[name].WhichOneof("value")])
        save = next((op for op in described if op.name == "SaveV2"), None)
        if save is not None:
            save.attr.add(name="ev_key_types", type="list(type)").default_value.list.SetInParent()
            save.attr.add(name="has_ev", type="bool").default_value.b = False

    def _of(self, op: str) -> Iterator[Proto]:
        return (node for node in self.meta_graph.graph_def.node if node.op == op)

    def _add(self, name: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> Proto:
        node = self.meta_graph.graph_def.node.add(name=name, op=op)
        node.input.extend(inputs)
        for key, value in attrs.items():
            _set(node.attr[key], value)
        self.nodes[name] = node
        return node

    def _constant(self, name: str, value: Any, dtype: DType) -> str:
        tensor = protos.TensorProto()
        fill(tensor, np.asarray(value, object if dtype is DType.STRING else dtype.numpy))
        self._add(name, "Const", dtype=dtype, value=tensor)
        return name

    def _handle(self, variable: EmbeddingVariable, node: Proto, shared_name: str = "") -> None:
        """EmbeddingVariable._embedding_variable_handle; the shape is one row's."""
        handle = protos.NodeDef(name=node.name, op="KvVarHandleOp")
        _set(handle.attr["dtype"], variable.dtype)
        _set(handle.attr["Tkeys"], variable.key_dtype)
        _set(handle.attr["shape"], (variable.dim,))
        _set(handle.attr["shared_name"], (shared_name or node.name).encode())
        _set(handle.attr["container"], b"")
        handle.attr["_class"].list.s.append(f"loc:@{node.name}".encode())
        node.CopyFrom(handle)

    def _gather(self, name: str, gather: _Gather) -> None:
        """KvResourceGather and KvResourceGatherV1 (core/ops/kv_variable_ops.cc)."""
        node, variable = self.nodes[name], gather.variable
        handle, ids = node.input[:2]
        op = "KvResourceGatherV1" if gather.counts else "KvResourceGather"
        made = protos.NodeDef(name=name, op=op, input=[handle, ids, gather.default_value])
        if gather.counts:
            made.input.append(gather.counts)
            _set(made.attr["counts_type"], DType.INT32)
        _set(made.attr["dtype"], variable.dtype)
        _set(made.attr["Tkeys"], variable.key_dtype)
        _set(made.attr["is_use_default_value_tensor"], gather.uses_default)
        _set(made.attr["validate_indices"], True)
        if self.program.generation is Generation.SECOND:
            _set(made.attr["is_inference"], True)
        made.attr["_class"].list.s.append(f"loc:@{handle}".encode())
        node.CopyFrom(made)

    def _options(self, variable: EmbeddingVariable, node: Proto, slot_index: int) -> None:
        """The attributes that both generations' init ops and KvResourceImportV2 carry."""
        values: dict[str, Any] = {
            "slot_num": 0, "shape": (variable.dim,), "dtype": variable.dtype, "Tkeys": variable.key_dtype,
            "steps_to_live": 0, "emb_index": 0, "block_num": variable.block_num, "slot_index": slot_index,
            "ht_type": b"", "ht_partition_num": 1000, "filter_freq": variable.filter_freq, "max_freq": 99999,
            "l2_weight_threshold": -1.0, "max_element_size": 0, "false_positive_probability": -1.0,
            "counter_type": DType.UINT64, "layout": b"", "storage_type": 1, "storage_path": b"./",
            "default_value_dim": _default_rows(variable), "record_freq": False, "record_version": False,
            "default_value_no_permission": variable.default_value_no_permission,
        }  # fmt: skip
        for key, value in values.items():
            _set(node.attr[key], value)

    def _initialise(self, variable: EmbeddingVariable, name: str, primary: str, slot_index: int) -> None:
        """EmbeddingVariable._init_from_args: the initializer, IsInitialized, Assign."""
        value = self._initial_value(variable, name)
        key = self._constant(f"{name}/invalid_key", -1, variable.key_dtype)
        self._add(
            f"{name}/IsInitialized/KvVarIsInitializedOp", "KvVarIsInitializedOp", [name],
            Tkeys=variable.key_dtype, dtype=variable.dtype,
        )  # fmt: skip
        first = self.program.generation is Generation.FIRST
        after = [f"^{primary}/Assign"] if slot_index else []
        inputs = [name, primary, value, key]
        if first:
            init = self._add(f"{name}/Assign", "InitializeKvVariableOp", [*inputs, *after])
            self._options(variable, init, slot_index)
            _set(init.attr["initial_num_buckets"], 131072)
            return
        for op, group, buckets in (
            (f"{name}/Assign/InitializeKvVariableV2Op", f"{name}/Assign", 131072),
            (f"{name}/Assign/InitializeKvVariableV2Op_1", f"{name}/Assign/NoOp", 0),
        ):
            init = self._add(op, "InitializeKvVariableV2Op", [*inputs, *after])
            self._options(variable, init, slot_index)
            _set(init.attr["initial_num_buckets"], buckets)
            _set(init.attr["embedding_variable_type"], 0)
            self._add(group, "NoOp", [f"^{op}"])

    def _initial_value(self, variable: EmbeddingVariable, name: str) -> str:
        """The nodes below `<ev>/Initializer` (python/ops/init_ops.py)."""
        scope, initializer, rows = f"{name}/Initializer", variable.initializer, _default_rows(variable)
        value = f"{scope}/initial_value"
        if isinstance(initializer, str):
            scope += "/truncated_normal"
            shape = self._constant(f"{scope}/shape", [rows, variable.dim], DType.INT32)
            draw = f"{scope}/TruncatedNormal"
            self._add(draw, "TruncatedNormal", [shape], dtype=variable.dtype, T=DType.INT32, seed=0, seed2=0)
            deviation = self._constant(f"{scope}/stddev", 0.05, variable.dtype)
            mean = self._constant(f"{scope}/mean", 0.0, variable.dtype)
            self._add(f"{scope}/mul", "Mul", [draw, deviation], T=variable.dtype)
            self._add(scope, "Add", [f"{scope}/mul", mean], T=variable.dtype)
            self._add(value, "Identity", [scope], T=variable.dtype)
        elif isinstance(initializer, np.ndarray):
            self._constant(value, initializer, variable.dtype)
        else:  # more than a few values: filled, not listed
            shape = self._constant(f"{scope}/Const/shape_as_tensor", [rows, variable.dim], DType.INT32)
            one = self._constant(f"{scope}/Const/Const", initializer, variable.dtype)
            self._add(f"{scope}/Const", "Fill", [shape, one], T=variable.dtype, index_type=DType.INT32)
            self._add(value, "Identity", [f"{scope}/Const"], T=variable.dtype)
        return value

    def _import(self, variable: EmbeddingVariable, name: str, number: int) -> str:
        """EmbeddingVariableSaveable.restore (python/training/saving/saveable_object_util.py)."""
        names = self._constant(f"save/{name}/names", name.encode(), DType.STRING)
        where: dict[str, Any] = {"partition_id": number, "partition_num": max(variable.parts, 1)}
        key = f"{name}/invalid_key"
        if self.program.generation is Generation.FIRST:
            node = f"save/KvResourceImportV2/{name}"
            inputs = ["save/Const", name, name, f"{name}/Initializer/initial_value", names, key]
            self._options(variable, self._add(node, "KvResourceImportV2", inputs, **where), 0)
        else:
            node = f"save/KvResourceImportV3/{name}"
            self._add(
                node, "KvResourceImportV3", ["save/Const", name, names, key, f"^{name}/Assign/NoOp"],
                shape=(variable.dim,), Tkeys=variable.key_dtype, dtype=variable.dtype, reset_version=False,
                **where,
            )  # fmt: skip
        return node

    def _save(self, saved: list[tuple[str, DType]]) -> None:
        """BaseSaverBuilder.save_op: global_step first, resources among tensors, two foreign attributes."""
        save = next(node for node in self.nodes.values() if node.op == "SaveV2")
        names, slices = (self.nodes[text] for text in save.input[1:3])
        step = self.meta_graph.graph_def.node
        global_step = next(node.name for node in step if node.name == "global_step")
        listed = [*names.attr["value"].tensor.string_val]
        boxes = [*slices.attr["value"].tensor.string_val]
        tensors = list(save.input[3:])
        dtypes = [*save.attr["dtypes"].list.type]
        if saved:
            listed.insert(0, b"global_step")
            boxes.insert(0, b"")
            tensors.insert(0, global_step)
            dtypes.insert(0, int(DType.INT64))
        for name, _ in saved:
            listed.append(name.encode())
            boxes.append(b"")
            tensors.append(name)
            dtypes.append(int(DType.RESOURCE))
        for node, values in ((names, listed), (slices, boxes)):
            fill(node.attr["value"].tensor, np.array(values, object))
            node.attr.pop("_output_shapes", None)
        save.input[3:] = tensors
        save.attr["dtypes"].list.type[:] = dtypes
        save.attr["ev_key_types"].list.type[:] = [int(dtype) for _, dtype in saved]
        save.attr["has_ev"].b = bool(saved)

    def _restore(self, restores: list[str]) -> None:
        restore_all = self.nodes["save/restore_all"]
        restore_all.input.extend(f"^{name}" for name in restores)
        init = self.nodes.get("init")
        if init is not None:
            init.input.extend(f"^{name}/Assign" for v in self.program.variables for name in v.part_names)

    def _collect(self, variable: EmbeddingVariable, name: str, number: int) -> None:
        """EmbeddingVariable.to_proto, in the collections of its kind."""
        definition = protos.VariableDef(
            variable_name=f"{name}:0",
            initializer_name=f"{name}/Assign",
            initial_value_name=f"{name}/Initializer/initial_value:0",
            is_resource=True,
            trainable=True,
        )
        if variable.parts:
            info = definition.save_slice_info_def
            info.full_name = variable.name
            info.full_shape.extend([variable.parts, variable.dim])
            info.var_offset.extend([number, 0])
            info.var_shape.extend([1, variable.dim])
        data = definition.SerializeToString() + _IS_EMBEDDING_VAR
        for collection in ("variables", "trainable_variables", "embedding_variables"):
            self.meta_graph.collection_def[collection].bytes_list.value.append(data)


_KINDS = {"type": "type", "i": "int", "f": "float", "s": "string", "b": "bool", "shape": "shape"}
_INITIALISE = "resource_self:resource resource_primary:resource value:dtype empty_key:Tkeys", ""
_OP_DEFS = {
    "KvVarHandleOp": ("", "resource:resource"),
    "KvVarIsInitializedOp": ("resource:resource", "is_initialized:bool"),
    "KvResourceGather": ("resource:resource indices:Tkeys default_value:dtype", "output:dtype"),
    "KvResourceGatherV1": (
        "resource:resource indices:Tkeys default_value:dtype counts:counts_type", "output:dtype"
    ),
    "InitializeKvVariableOp": _INITIALISE,
    "InitializeKvVariableV2Op": _INITIALISE,
    "KvResourceImportV2": (
        "prefix:string resource_self:resource resource_primary:resource value:dtype tensor_names:string "
        "empty_key:Tkeys", ""
    ),
    "KvResourceImportV3": ("prefix:string resource_self:resource tensor_names:string empty_key:Tkeys", ""),
}  # fmt: skip
"""Inputs and outputs, `name:type` or `name:attribute that has the type` (core/ops/kv_variable_ops.cc)."""


def train_op(meta_graph: Proto, variable: EmbeddingVariable, gradient: str, ids: str) -> None:
    """Add what an optimizer adds for each part (core/ops/training_ali_ops.cc)."""
    names = []
    for name in variable.part_names:
        node = meta_graph.graph_def.node.add(
            name=f"Adagrad/update_{name}/KvResourceSparseApplyAdagrad", op="KvResourceSparseApplyAdagrad"
        )
        node.input.extend([name, f"{name}/Adagrad", f"{name}/lr", gradient, ids, "global_step"])
        rate = meta_graph.graph_def.node.add(name=f"{name}/lr", op="Const")
        _set(rate.attr["dtype"], DType.FLOAT)
        fill(rate.attr["value"].tensor, np.float32(0.1))
        for key, dtype in (("T", variable.dtype), ("Tindices", variable.key_dtype), ("Tstep", DType.INT64)):
            _set(node.attr[key], dtype)
        _set(node.attr["use_locking"], True)
        names.append(node.name)
    group = meta_graph.graph_def.node.add(name="Adagrad", op="NoOp")
    group.input.extend(f"^{name}" for name in names)


def _default_rows(variable: EmbeddingVariable) -> int:
    """Rows of the initial value: 1 for tf.constant_initializer (python/ops/variable_scope.py)."""
    if isinstance(variable.initializer, str):
        return variable.default_value_dim
    return len(variable.initializer) if isinstance(variable.initializer, np.ndarray) else 1


def _with_incr_saver(meta_graph: Proto) -> Proto:
    """MetaGraphDef with the field 8 that DeepRec has: the SaverDef of incremental checkpoints."""
    saver = meta_graph.saver_def.SerializeToString()
    tag = bytes([_INCR_SAVER_DEF << 3 | 2])
    return protos.MetaGraphDef.FromString(meta_graph.SerializeToString() + tag + _varint(len(saver)) + saver)


def _varint(number: int) -> bytes:
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*low, number])


def _set(attr: Proto, value: Any) -> None:
    if isinstance(value, DType):
        attr.type = int(value)
    elif isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, float):
        attr.f = value
    elif isinstance(value, bytes):
        attr.s = value
    elif isinstance(value, tuple):
        attr.shape.CopyFrom(shape_proto(value))
    else:
        attr.tensor.CopyFrom(value)
