"""Make complete SignatureDefs from the tensor names of a request or a graph; list and rename tensors.

A signatures file (`--signatures FILE`) is one JSON object. Each key is a signature's name, each value has its
input and output tensors and, if it is not `predict`, TensorFlow Serving's method:

    {"serving_default": {"inputs": {"image": "Placeholder:0"}, "outputs": {"scores": "cnn/Softmax:0"}},
     "classify": {"inputs": {"inputs": "examples:0"}, "outputs": {"scores": "cnn/Softmax"},
                  "method": "classify"}}

A tensor's name without `:index` means output 0. Instead of `inputs` a signature may have `examples`, the
features of serialized tf.Examples that feed the graph (see `exporter.graph.examples`), or the name of another
signature that has them. Its only input is then `inputs` if the method is classify or regress, or `examples`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import GraphError, NotServable, UsageError
from exporter.graph.examples import Feature, add_parser, read_features
from exporter.graph.nodes import Endpoint, GraphIndex, base_dtype, endpoint, node_of, shape_proto
from exporter.graph.source_graph import GraphRequest, read_signatures
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

StaticShape = tuple[int | None, ...] | None
"""A static shape as in TensorFlow's Python: None for unknown lengths, and for an unknown rank."""


class SignatureTensor(Struct, frozen=True):
    """A tensor of a signature by its canonical name, `node:0`."""

    name: str
    dtype: DType
    shape: StaticShape


def tensors_of(infos: Mapping[str, Proto]) -> list[SignatureTensor]:
    """Return the tensors of a signature's inputs or outputs, each once, in the order of their aliases.

    All must be plain tensors: sparse and composite ones have no name. GraphError for an unknown type number.
    """
    found = (
        SignatureTensor(canonical(info.name), base_dtype(info.dtype), _shape(info.tensor_shape))
        for _, info in sorted(infos.items())
    )
    return list({tensor.name: tensor for tensor in found}.values())


def signature_nodes(meta_graph: Proto) -> set[str]:
    """Return the names of the nodes of all signatures' inputs and outputs, which must be plain tensors.

    GraphError for an unknown type number.
    """
    return {
        node_of(tensor.name)
        for signature in meta_graph.signature_def.values()
        for tensor in (*tensors_of(signature.inputs), *tensors_of(signature.outputs))
    }


class SignatureEnds(Struct, frozen=True):
    """A signature's input tensors, each with one of its aliases there, and its output tensors."""

    inputs: dict[Endpoint, str]
    outputs: list[Endpoint]

    @classmethod
    def of(cls, signature: Proto) -> SignatureEnds:
        """Return the tensors of a SignatureDef, sparse and composite ones as their components.

        Both are in the order of their aliases; of several aliases of an input the last is kept.
        """
        inputs: dict[Endpoint, str] = {}
        outputs: list[Endpoint] = []
        for role, alias, info in signature_tensors(signature):
            if role == "input":
                inputs |= dict.fromkeys(map(endpoint, tensor_names(info)), alias)
            else:
                outputs += map(endpoint, tensor_names(info))
        return cls(inputs, outputs)

    @property
    def nodes(self) -> set[str]:
        """The names of the nodes of all these tensors."""
        return {tensor.node for tensor in (*self.inputs, *self.outputs)}

    @property
    def computed(self) -> list[str]:
        """Return the names of the nodes that make the outputs, each once.

        An output that is an input as well does not count.
        """
        return [*dict.fromkeys(tensor.node for tensor in self.outputs if tensor not in self.inputs)]


def signature_tensors(signature: Proto) -> Iterator[tuple[str, str, Proto]]:
    """Yield ("input" or "output", alias, TensorInfo) for each tensor of a signature.

    Inputs come first; both are sorted by alias.
    """
    for alias, info in sorted(signature.inputs.items()):
        yield "input", alias, info
    for alias, info in sorted(signature.outputs.items()):
        yield "output", alias, info


def tensor_names(info: Proto) -> list[str]:
    """Return the names of a TensorInfo's tensors: one, a sparse tensor's three, or all of a composite's."""
    return [getattr(message, field) for message, field in _names(info)]


def without_references(meta_graph: Proto) -> None:
    """Replace reference types in signatures, in place, by the types referred to, which clients know.

    GraphError for an unknown type number.
    """
    for signature in meta_graph.signature_def.values():
        for _, _, info in signature_tensors(signature):
            for part in (info, *info.composite_tensor.components):
                if part.dtype > max(DType):
                    part.dtype = int(base_dtype(part.dtype))


def rename_tensors(info: Proto, names: Mapping[str, str]) -> None:
    """Rename a TensorInfo's tensors, in place; `names` is {old canonical name: new name}.

    Other tensors keep their names. All names get the canonical form, `node:0`.
    """
    for message, field in _names(info):
        name = canonical(getattr(message, field))
        setattr(message, field, canonical(names.get(name, name)))


def canonical(name: str) -> str:
    """Return a tensor's name with its output number: `node:0` for `node`."""
    return name if ":" in name else f"{name}:0"


def _names(info: Proto) -> Iterator[tuple[Proto, str]]:
    """Yield (message in a TensorInfo, field) for each field that holds the name of a tensor."""
    if info.HasField("coo_sparse"):
        for what in ("values", "indices", "dense_shape"):
            yield info.coo_sparse, f"{what}_tensor_name"
    elif info.HasField("composite_tensor"):
        for part in info.composite_tensor.components:
            yield from _names(part)
    elif info.name:
        yield info, "name"


def _shape(shape: Proto) -> StaticShape:
    if shape.unknown_rank:
        return None
    return tuple(dim.size if dim.size >= 0 else None for dim in shape.dim)


DEFAULT_SIGNATURE = "serving_default"
METHODS = {name: f"tensorflow/serving/{name}" for name in ("predict", "classify", "regress")}
INTERNAL = ("__saved_model_init_op", "__saved_model_train_op")
"""The entries of a SavedModel's signature_def that are not signatures."""

_EXAMPLES_INPUT = {"classify": "inputs", "regress": "inputs"}
_OUTPUTS_OF = {"classify": {"classes", "scores"}, "regress": {"outputs"}}


class SignatureSpec(Struct, frozen=True):
    """A signature by tensor names, without types and shapes."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    method: str = "predict"
    examples: tuple[Feature, ...] = ()  # with them there are no `inputs` yet: see `parse_examples`


def requested_specs(request: GraphRequest) -> list[SignatureSpec]:
    """Return the signatures of `--signatures`, else of `--input` and `--output`; empty without any.

    UsageError if both are given, if there are inputs without outputs, or if the file cannot be read or is not
    valid; CheckpointError if it is a pointer of Git LFS, or cannot be fetched from a store.
    """
    by_hand = bool(request.inputs or request.outputs)
    if request.signatures is not None:
        if by_hand:
            raise UsageError("--signatures and --input/--output exclude each other")
        return read_signatures_file(request.signatures)
    if not by_hand:
        return []
    if not request.outputs:
        raise UsageError("--input is given without --output", hint="add --output NAME=TENSOR")
    return [SignatureSpec(DEFAULT_SIGNATURE, request.inputs, request.outputs)]


def read_signatures_file(path: Path) -> list[SignatureSpec]:
    """Return the signatures of a JSON file in its order; UsageError if it cannot be read or is not valid.

    CheckpointError if it is a pointer of Git LFS, or cannot be fetched from a store.
    """
    document = read_signatures(path)
    if not isinstance(document, dict) or not document:
        raise UsageError(f"--signatures {path}: expected one object that maps names to signatures")
    return [_spec(str(path), name, entry, document) for name, entry in document.items()]


def _spec(where: str, name: str, entry: Any, document: Mapping[str, Any]) -> SignatureSpec:
    """Return the signature `name` of a signatures file, from its value `entry`.

    UsageError if that is not valid. `where` names the file, and `document` is all of it.
    """
    wanted = 'expected {"inputs": {NAME: TENSOR}, "outputs": {NAME: TENSOR}, "method": "predict"}'
    if not isinstance(entry, dict) or set(entry) - {"inputs", "examples", "outputs", "method"}:
        raise UsageError(f"{where}: signature {name!r} is not a signature", cause=wanted)
    inputs, outputs = entry.get("inputs", {}), entry.get("outputs", {})
    if not _is_names(inputs) or not _is_names(outputs) or not outputs:
        raise UsageError(f"{where}: signature {name!r} lacks tensor names", cause=wanted)
    method = entry.get("method", "predict")
    if not isinstance(method, str) or method not in METHODS:
        raise UsageError(
            f"{where}: signature {name!r} has method {method!r}", cause=f"known are {', '.join(METHODS)}"
        )
    if "examples" not in entry:
        return SignatureSpec(name, inputs, outputs, method)
    if inputs:
        raise UsageError(f"{where}: signature {name!r} has both inputs and examples")
    examples = entry["examples"]
    if isinstance(examples, str) and isinstance(other := document.get(examples), dict):
        examples = other.get("examples")  # the name of a signature means that signature's features
    return SignatureSpec(name, {}, outputs, method, read_features(f"{where}: signature {name!r}", examples))


def parse_examples(meta_graph: Proto, index: GraphIndex, specs: list[SignatureSpec]) -> list[SignatureSpec]:
    """Add one parser of Examples to the graph, and return the specs with its input and the parsed tensors.

    Specs without `examples` use parsed tensors, too. If no spec has examples, nothing changes. `index` does
    not get the new nodes. UsageError if two specs parse different features, or if a feature does not fit its
    tensors; UnknownTensor if the graph lacks one, GraphError if it does not describe one.
    """
    asking = [spec for spec in specs if spec.examples]
    if not asking:
        return specs
    first = asking[0]
    if other := next((spec for spec in asking if spec.examples != first.examples), None):
        raise UsageError(
            f"signatures {first.name!r} and {other.name!r} parse different features",
            cause="one graph has one parser",
            hint=f'name the features once, then say "examples": "{first.name}"',
        )
    parser = add_parser(meta_graph, index, first.examples)

    def moved(names: Mapping[str, str]) -> dict[str, str]:
        return {alias: str(parser.parsed.get(endpoint(text), text)) for alias, text in names.items()}

    found = []
    for spec in specs:
        given = {_EXAMPLES_INPUT.get(spec.method, "examples"): str(parser.examples)}
        inputs = given if spec.examples else moved(spec.inputs)
        found.append(replace(spec, inputs=inputs, outputs=moved(spec.outputs)))
    return found


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def collection_spec(meta_graph: Proto) -> SignatureSpec | None:
    """Return the signature in the collections `inputs` and `outputs`; None if the graph lacks one of them.

    GraphError if each does not hold one JSON object of tensor names.
    """
    # Cloud ML's convention: `tf.add_to_collection("inputs", json.dumps({"image": x.name}))`.
    if not {"inputs", "outputs"} <= set(meta_graph.collection_def):
        return None
    found = {}
    for name in ("inputs", "outputs"):
        values = meta_graph.collection_def[name].bytes_list.value
        try:
            found[name] = json.loads(values[0])
        except (IndexError, ValueError, RecursionError):
            found[name] = None
        if len(values) != 1 or not _is_names(found[name]):
            raise GraphError(
                f"the graph's collection {name!r} does not hold one JSON object of tensor names",
                hint="name the tensors yourself: --input NAME=TENSOR --output NAME=TENSOR",
            )
    return SignatureSpec(DEFAULT_SIGNATURE, found["inputs"], found["outputs"])


def set_signatures(meta_graph: Proto, index: GraphIndex, specs: Iterable[SignatureSpec]) -> None:
    """Replace the signatures of `meta_graph` by complete SignatureDefs of the specs.

    Raises:
        UnknownTensor: a spec names a tensor that the graph lacks.
        UsageError: a tensor has no values, or a method does not allow the tensors.
        GraphError: the type of a tensor is unknown.
    """
    meta_graph.signature_def.clear()
    for spec in specs:
        signature = meta_graph.signature_def[spec.name]
        signature.method_name = METHODS[spec.method]
        for alias, text in spec.inputs.items():
            info = _tensor_info(index, text, f"input {alias!r} of {spec.name!r}")
            signature.inputs[alias].CopyFrom(info)
        for alias, text in spec.outputs.items():
            info = _tensor_info(index, text, f"output {alias!r} of {spec.name!r}")
            signature.outputs[alias].CopyFrom(info)
        check_method(spec.name, signature)


def _tensor_info(index: GraphIndex, text: str, role: str) -> Proto:
    """Return the TensorInfo of the tensor that a user named by `text`; `role` begins the messages of errors.

    UnknownTensor if the graph lacks it, UsageError if it has no values, GraphError if its type is unknown.
    """
    tensor = index.resolve(text, role)
    if index.dtype(tensor) in (DType.RESOURCE, DType.VARIANT):
        readers = (name for name, _ in index.consumers[tensor.node])
        reader = next((name for name in readers if index.nodes[name].op == "ReadVariableOp"), None)
        raise UsageError(
            f"{role} names {str(tensor)!r}, a {index.dtype(tensor).label}",
            cause="a request and a response hold values, not handles",
            hint=f"its value is the tensor {reader}:0" if reader else "name a tensor with values",
        )
    shape = shape_proto(index.shape(tensor))
    return protos.TensorInfo(name=str(tensor), dtype=int(index.dtype(tensor)), tensor_shape=shape)


def check_method(name: str, signature: Proto) -> None:
    """Raise UsageError for a classify or regress signature with other tensors than its method allows.

    TensorFlow Serving requires them (tensorflow_serving/servables/tensorflow/{classifier,regressor}.cc): one
    input `inputs` of serialised tf.Examples; outputs `classes` and/or `scores`, or `outputs`. `name` is the
    signature's. GraphError if the input has an unknown type number.
    """
    method = signature.method_name.rpartition("/")[2]
    if method not in _OUTPUTS_OF:
        return
    allowed = _OUTPUTS_OF[method]
    if set(signature.inputs) != {"inputs"} or not signature.outputs or set(signature.outputs) - allowed:
        raise UsageError(
            f"signature {name!r} has method {method} with inputs {sorted(signature.inputs)} "
            f"and outputs {sorted(signature.outputs)}",
            cause=f"TensorFlow Serving asks for the input 'inputs' and for outputs named {sorted(allowed)}",
            hint="rename them, or use the method predict",
        )
    if base_dtype(signature.inputs["inputs"].dtype) is not DType.STRING:
        raise UsageError(
            f"signature {name!r} has method {method}, but its input is not a string",
            cause="TensorFlow Serving feeds it serialised tf.Examples",
            hint='say how to parse them: "examples" in --signatures FILE; a builder has tf.io.parse_example',
        )


def drop_internal(meta_graph: Proto) -> None:
    """Remove, in place, the entries of a SavedModel's `signature_def` that are not signatures."""
    for name in INTERNAL:
        meta_graph.signature_def.pop(name, None)


def none_servable(label: str, reasons: Mapping[str, str], hint: str) -> NotServable:
    """Return the error to raise for the graph named `label` whose signatures cannot be served.

    `reasons` is {signature: reason}; `hint` is the error's.
    """
    listed = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
    return NotServable(f"no signature of {label} can be served", cause=listed, hint=hint)


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """Return a note on each signature that is left out, sorted by name; `reasons` is {signature: reason}."""
    return [f"signature {name!r} is left out: {reason}" for name, reason in sorted(reasons.items())]


def keep_answering(meta_graph: Proto, label: str) -> list[str]:
    """Remove the signatures that TensorFlow Serving cannot answer, in place, and return notes on them.

    Sparse and composite tensors become their components, `ids`, `ids_1` and so on. NotServable if there
    were signatures and none is left; `label` names the graph in its message. GraphError for an unknown type
    number.
    """
    # A server fetches tensors by their names, and at least one. A sparse or ragged tensor has no name, so it
    # is served as its components: `ids`, `ids_1` and so on.
    reasons = {}
    for name, signature in sorted(meta_graph.signature_def.items()):
        for infos in (signature.inputs, signature.outputs):
            if reason := _take_apart(infos):
                reasons[name] = reason
        if not signature.outputs:
            reasons[name] = "it has no outputs"
    if reasons and len(reasons) == len(meta_graph.signature_def):
        raise none_servable(
            label,
            reasons,
            "save the model with a signature that returns tensors, or name tensors: "
            "--input NAME=TENSOR --output NAME=TENSOR",
        )
    for name in reasons:
        del meta_graph.signature_def[name]
    return left_out(reasons)


def _take_apart(infos: Any) -> str:
    """Replace each sparse or composite TensorInfo in `infos`, in place, by the TensorInfos of its components.

    `infos` is a signature's map of inputs or of outputs. Returns "", or the reason why a tensor cannot be
    served; others may be replaced already. GraphError for an unknown type number.
    """
    given = sorted(infos)
    for alias in given:
        parts = [*_parts(infos[alias])]
        if not parts or not all(part.name for part in parts):
            return f"{alias!r} names no tensor"
        if any(base_dtype(part.dtype) in (DType.RESOURCE, DType.VARIANT) for part in parts):
            return f"{alias!r} is {_kind(infos[alias])}, and a request and a response hold values"
        names = [f"{alias}_{number}" if number else alias for number in range(len(parts))]
        if taken := {*names[1:]} & {*given}:
            return f"{alias!r} is served as its components, and {min(taken)!r} is taken"
        del infos[alias]
        for name, part in zip(names, parts, strict=True):
            infos[name].CopyFrom(part)
    return ""


def _parts(info: Proto) -> Iterator[Proto]:
    """Yield copies of the plain TensorInfos of a TensorInfo, in the order of `tf.nest.flatten`.

    GraphError if a sparse tensor has an unknown type number.
    """
    if info.HasField("coo_sparse"):
        shape, sparse = _shape(info.tensor_shape), info.coo_sparse
        rank = None if shape is None else len(shape)
        for name, dtype, sizes in (
            (sparse.indices_tensor_name, DType.INT64, (None, rank)),
            (sparse.values_tensor_name, base_dtype(info.dtype), (None,)),
            (sparse.dense_shape_tensor_name, DType.INT64, (rank,)),
        ):
            part = protos.TensorInfo(name=name, dtype=int(dtype))
            part.tensor_shape.CopyFrom(shape_proto(tuple(-1 if size is None else size for size in sizes)))
            yield part
    elif info.HasField("composite_tensor"):
        for component in info.composite_tensor.components:
            yield from _parts(component)
    else:
        yield deepcopy(info)


def _kind(info: Proto) -> str:
    """Return the kind of a tensor without values, for a message: `a resource`, or a composite's class.

    GraphError for an unknown type number.
    """
    if info.HasField("composite_tensor"):
        return f"a composite tensor with a handle ({info.composite_tensor.type_spec.type_spec_class_name})"
    return f"a {base_dtype(info.dtype).label}"


def check_signatures(meta_graph: Proto, index: GraphIndex) -> None:
    """Write every tensor's name in `signature_def` as `node:output`, in place.

    UnknownTensor if the graph lacks a tensor, GraphError if a tensor's node has an unknown type number.
    """
    for name, signature in meta_graph.signature_def.items():
        for role, alias, info in signature_tensors(signature):
            for text in tensor_names(info):
                tensor = index.resolve(text, f"{role} {alias!r} of {name!r}")
                rename_tensors(info, {canonical(text): str(tensor)})
