"""Run a signature: convert its inputs from messages to arrays and its outputs back, as TF Serving does.

The rules, error codes and messages follow tensorflow_serving/servables/tensorflow (predict_util.cc,
classifier.cc, regressor.cc, multi_inference.cc), so that clients get the same responses as from TF Serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import dtype_of, fill, to_array
from serving.status import MAX_FILLED_BYTES, Code, StatusError, invalid

DEFAULT_SIGNATURE = "serving_default"
PREDICT = "tensorflow/serving/predict"
CLASSIFY = "tensorflow/serving/classify"
REGRESS = "tensorflow/serving/regress"


class Inference(Struct, frozen=True, kw_only=True):
    """Settings for computing responses, and the time limit of one."""

    timeout_ms: int | None = None
    """Milliseconds after which the session stops the step; None is never."""
    max_filled_bytes: int = MAX_FILLED_BYTES
    """A request is refused if filling its tensors to their shapes would take more bytes."""
    checks_method_names: bool = False
    """Refuse a call whose method differs from the signature's. TF Serving's binary does not check by default,
    because models of TensorFlow 2 name `predict` in all their signatures."""
    as_tensor_content: bool = False
    """Encode Predict's outputs in `tensor_content` instead of the field of each type."""


DEFAULT_INFERENCE = Inference()


class Model(Protocol):
    """A loaded version."""

    @property
    def signatures(self) -> Mapping[str, Proto]:
        """Return the `SignatureDef`s by name."""

    def run(
        self, feeds: Mapping[str, NDArray[Any]], fetches: Sequence[str], timeout_ms: int | None = None
    ) -> list[NDArray[Any]]:
        """Return the values of the tensors `fetches`, in their order, computed from `feeds`, by tensor name.

        `timeout_ms` limits the run, None does not. StatusError for unknown tensor names; TensorFlow's own
        errors pass.
        """


def predict(model: Model, request: Proto, response: Proto, how: Inference = DEFAULT_INFERENCE) -> None:
    """Run a signature on the inputs of a `PredictRequest`, and fill the outputs of a `PredictResponse`.

    The `model_spec` of `response` is not filled; `how` has limits and the form of tensors. StatusError, as in
    TF Serving, if the signature does not exist, or the request does not fit it; or if an output has a type
    that cannot be sent; TensorFlow's own errors pass.
    """
    signature = _predict_signature(model, request.model_spec.signature_name, how)
    feeds = _feeds(signature, request.inputs, how.max_filled_bytes)
    aliases = _output_aliases(signature, request.output_filter)
    values = model.run(feeds, [signature.outputs[alias].name for alias in aliases], how.timeout_ms)
    for alias, value in zip(aliases, values, strict=True):
        try:
            fill(response.outputs[alias], np.asarray(value), as_fields=not how.as_tensor_content)
        except (TypeError, ValueError) as error:
            raise invalid(f"Output {alias} cannot be sent: {error}") from error


def predict_arrays(
    model: Model,
    signature_name: str,
    inputs: Mapping[str, NDArray[Any]],
    how: Inference = DEFAULT_INFERENCE,
) -> dict[str, NDArray[Any]]:
    """Run a signature without messages: arrays by input name in, arrays by output name out, sorted.

    An empty name is the default signature's; an input may be left out if it has a default. `how` has the time
    limit. StatusError if the signature does not exist, or the inputs do not fit it; TensorFlow's own errors
    pass.
    """
    signature = _predict_signature(model, signature_name, how)
    _check_aliases(signature, set(inputs))
    feeds = {
        info.name: inputs[alias]
        if alias in inputs
        else _value(alias, signature.defaults[alias], how.max_filled_bytes)
        for alias, info in signature.inputs.items()
    }
    aliases = sorted(signature.outputs)
    values = model.run(feeds, [signature.outputs[alias].name for alias in aliases], how.timeout_ms)
    return {alias: np.asarray(value) for alias, value in zip(aliases, values, strict=True)}


def classify(model: Model, request: Proto, response: Proto, how: Inference = DEFAULT_INFERENCE) -> None:
    """Run a classify signature on the examples of a request, and fill `result` of a `ClassificationResponse`.

    StatusError, as in TF Serving, if the signature does not exist or has not the tensors of a classification,
    the request has no examples, or an output has another type or shape; TensorFlow's own errors pass. With
    `how.checks_method_names` the signature's method must be `classify`.
    """
    signature = _signature_of(model, request.model_spec)
    input_, outputs = _classify_tensors(signature, how)
    examples = _examples(request.input, how.max_filled_bytes)
    values = model.run({input_: examples}, outputs, how.timeout_ms)
    _fill_classes(signature, len(examples), dict(zip(outputs, values, strict=True)), response.result)


def regress(model: Model, request: Proto, response: Proto, how: Inference = DEFAULT_INFERENCE) -> None:
    """Run a regress signature on the examples of a request, and fill `result` of a `RegressionResponse`.

    StatusError, as in TF Serving, if the signature does not exist or has not the tensors of a regression, the
    request has no examples, or the output has another type or shape; TensorFlow's own errors pass. With
    `how.checks_method_names` the signature's method must be `regress`.
    """
    signature = _signature_of(model, request.model_spec)
    input_, output = _regress_tensors(signature, how)
    examples = _examples(request.input, how.max_filled_bytes)
    (value,) = model.run({input_: examples}, [output], how.timeout_ms)
    _fill_regressions(len(examples), value, response.result)


def multi_inference(
    model: Model, request: Proto, response: Proto, how: Inference = DEFAULT_INFERENCE
) -> None:
    """Run several classify and regress signatures over one input, in one step of the session.

    Appends a result for each task of the request, in order, to `response`, a `MultiInferenceResponse`. The
    examples are fed to the input tensor of each signature: in TensorFlow 2 each has its own. StatusError if a
    task names another method, another model than the first, an absent signature, one of an earlier task, or
    one without the tensors of its method; or if there are no examples, or an output has another type or
    shape; TensorFlow's own errors pass.
    """
    tasks = [(task, _task_signature(model, request.tasks, index)) for index, task in enumerate(request.tasks)]
    inputs: set[str] = set()
    fetches: set[str] = set()
    for task, signature in tasks:
        if task.method_name == CLASSIFY:
            input_, outputs = _classify_tensors(signature, how)
            fetches.update(outputs)
        elif task.method_name == REGRESS:
            input_, output = _regress_tensors(signature, how)
            fetches.add(output)
        else:
            raise StatusError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        inputs.add(input_)
    examples = _examples(request.input, how.max_filled_bytes)
    names = sorted(fetches)
    values = dict(zip(names, model.run(dict.fromkeys(inputs, examples), names, how.timeout_ms), strict=True))
    for task, signature in tasks:
        result = response.results.add()
        if task.method_name == CLASSIFY:
            _fill_classes(signature, len(examples), values, result.classification_result)
        else:
            value = values[signature.outputs["outputs"].name]
            _fill_regressions(len(examples), value, result.regression_result)


def _predict_signature(model: Model, name: str, how: Inference) -> Proto:
    name = name or DEFAULT_SIGNATURE
    if name not in model.signatures:
        raise StatusError(Code.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')
    signature = model.signatures[name]
    if how.checks_method_names and signature.method_name not in (PREDICT, CLASSIFY, REGRESS):
        raise StatusError(
            Code.INTERNAL,
            f"Expected prediction signature method_name to be one of {{{PREDICT}, {CLASSIFY}, {REGRESS}}}. "
            f"Was: {signature.method_name}",
        )
    return signature


def _feeds(signature: Proto, inputs: Mapping[str, Proto], max_filled_bytes: int) -> dict[str, NDArray[Any]]:
    sent = set(inputs)
    _check_aliases(signature, sent)
    return {
        info.name: _value(alias, (inputs if alias in sent else signature.defaults)[alias], max_filled_bytes)
        for alias, info in signature.inputs.items()
    }


def _check_aliases(signature: Proto, sent: set[str]) -> None:
    wanted = set(signature.inputs)
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not signature.defaults):
        raise invalid(
            f"input size does not match signature: {len(sent)}!={len(wanted)} len({_set(sent)}) != "
            f"len({_set(wanted)}). Sent extra: {_set(sent - wanted)}. "
            f"Missing but required: {_set(wanted - sent)}."
        )
    if unknown := sent - wanted:
        raise invalid(
            f"input tensor alias not found in signature: {min(unknown)}. "
            f"Inputs expected to be in the set {_set(wanted)}."
        )
    if missing := wanted - sent - set(signature.defaults):
        alias = min(missing)
        raise invalid(
            f"Signature input alias: {alias}(feed name: {signature.inputs[alias].name}) not found in request "
            f"and no default value provided. Inputs expected to be in the request {_set(sent)}, "
            f"or default input alias set: {_set(signature.defaults)}"
        )


def _value(alias: str, proto: Proto, max_filled_bytes: int) -> NDArray[Any]:
    try:
        return to_array(proto, max_filled_bytes)
    except ValueError as error:
        raise invalid(f"tensor parsing error: {alias}: {error}") from error


def _output_aliases(signature: Proto, wanted: Iterable[str]) -> list[str]:
    aliases: list[str] = []
    for alias in wanted:
        if alias not in signature.outputs:
            raise invalid(
                f"output tensor alias not found in signature: {alias} "
                f"Outputs expected to be in the set {_set(signature.outputs)}."
            )
        if alias in aliases:
            raise invalid(f"duplicate output tensor alias: {alias}")
        aliases.append(alias)
    return aliases or sorted(signature.outputs)


def _signature_of(model: Model, spec: Proto) -> Proto:
    name = spec.signature_name or DEFAULT_SIGNATURE
    if name not in model.signatures:
        raise invalid(f"No signature was found with the name: {name}")
    return model.signatures[name]


def _expect_method(signature: Proto, method: str, kind: str, how: Inference) -> None:
    if how.checks_method_names and signature.method_name != method:
        raise invalid(f"Expected {kind} signature method_name to be {method}. Was: {signature.method_name}")


def _task_signature(model: Model, tasks: Sequence[Proto], index: int) -> Proto:
    spec = tasks[index].model_spec
    if not spec.name:
        raise invalid("Found ModelSpec with an empty model name.")
    if spec.name != tasks[0].model_spec.name:
        raise invalid("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
    name = spec.signature_name or DEFAULT_SIGNATURE
    if name in {task.model_spec.signature_name or DEFAULT_SIGNATURE for task in tasks[:index]}:
        raise invalid(f"Duplicate evaluation of signature: {name}")
    if name not in model.signatures:
        raise invalid(f"Requested signature not found in model graph: {name}")
    return model.signatures[name]


def _classify_tensors(signature: Proto, how: Inference) -> tuple[str, list[str]]:
    """Return the name of a signature's input tensor, and the names of its output tensors.

    The outputs are `classes` and `scores`, in this order, or one of them. StatusError if the signature has
    neither, more than two outputs, or not `inputs` alone as input; or, with `how.checks_method_names`,
    another method.
    """
    _expect_method(signature, CLASSIFY, "classification", how)
    if len(signature.inputs) != 1:
        raise invalid("Expected one input Tensor.")
    if len(signature.outputs) not in (1, 2):
        raise invalid(f"Expected one or two output Tensors, found {len(signature.outputs)}")
    input_ = _input_tensor(signature, "classification")
    outputs = [signature.outputs[alias].name for alias in ("classes", "scores") if alias in signature.outputs]
    if not outputs:
        raise invalid(
            'Expected classification signature outputs to contain at least one of "classes" or "scores". '
            f"Signature was: {signature}"
        )
    return input_, outputs


def _regress_tensors(signature: Proto, how: Inference) -> tuple[str, str]:
    _expect_method(signature, REGRESS, "regression", how)
    if len(signature.inputs) != 1:
        raise invalid("Expected one input Tensor.")
    if len(signature.outputs) != 1:
        raise invalid("Expected one output Tensor.")
    input_ = _input_tensor(signature, "regression")
    if "outputs" not in signature.outputs:
        raise invalid(f"No regression outputs found in SignatureDef: {signature}")
    return input_, signature.outputs["outputs"].name


def _input_tensor(signature: Proto, kind: str) -> str:
    if "inputs" not in signature.inputs:
        raise invalid(f"No {kind} inputs found in SignatureDef: {signature}")
    return str(signature.inputs["inputs"].name)


def _examples(input_: Proto, max_filled_bytes: int) -> NDArray[Any]:
    """Return serialised `tf.Example`s, string [n], each after the shared context if there is one.

    Concatenated messages merge when they are parsed, and the later one, the example, wins. StatusError if
    there are none, or the contexts would take more than `max_filled_bytes`.
    """
    kind = input_.WhichOneof("kind")
    messages = getattr(input_, kind).examples if kind else ()
    if not messages:
        raise invalid("Input is empty.")
    context = (
        input_.example_list_with_context.context.SerializeToString() if kind.endswith("context") else b""
    )
    if len(context) * len(messages) > max_filled_bytes:
        raise invalid(
            f"a context of {len(context)} bytes before each of {len(messages)} examples is more than "
            f"{max_filled_bytes} bytes"
        )
    # Objects: numpy's own type of bytes drops zeros at the end, and a message may end in them.
    array = np.empty(len(messages), object)
    array[:] = [context + message.SerializeToString() for message in messages]
    return array


def _fill_classes(signature: Proto, count: int, values: Mapping[str, NDArray[Any]], result: Proto) -> None:
    classes = _matrix(signature, "classes", "DT_STRING", count, values)
    scores = _matrix(signature, "scores", "DT_FLOAT", count, values)
    if classes is not None and scores is not None and classes.shape[1] != scores.shape[1]:
        raise invalid(
            "Tensors class and score should match in dim_size(1). "
            f"Got {classes.shape[1]} vs. {scores.shape[1]}"
        )
    for row in range(count):
        added = result.classifications.add().classes
        labels = [] if classes is None else classes[row].tolist()
        numbers = [] if scores is None else scores[row].tolist()
        for column in range(max(len(labels), len(numbers))):
            item = added.add()
            if labels:
                item.label = labels[column].decode("utf-8", "replace")  # a proto's string holds UTF-8 alone
            if numbers:
                item.score = numbers[column]


def _matrix(
    signature: Proto, alias: str, dtype: str, count: int, values: Mapping[str, NDArray[Any]]
) -> NDArray[Any] | None:
    if alias not in signature.outputs:
        return None
    value = values[signature.outputs[alias].name]
    if value.ndim != 2:
        raise invalid(f"Expected Tensor shape: [batch_size num_classes] but got {_shape(value)}")
    if _dtype_name(value) != dtype:
        raise invalid(f"Expected {alias} Tensor of {dtype}. Got: {_dtype_name(value)}")
    if len(value) != count:
        raise invalid(f"Expected {alias} output batch size of {count}. Got: {len(value)}")
    return value


def _fill_regressions(count: int, value: NDArray[Any], result: Proto) -> None:
    if not (value.ndim == 1 or (value.ndim == 2 and value.shape[1] == 1)):
        raise invalid(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] "
            f"but got {_shape(value)}"
        )
    if len(value) != count:
        raise invalid(f"Input batch size did not match output batch size: {count} vs. {len(value)}")
    if _dtype_name(value) != "DT_FLOAT":
        raise invalid(f"Expected output Tensor of DT_FLOAT.  Got: {_dtype_name(value)}")
    for number in value.ravel().tolist():
        result.regressions.add().value = number


def _set(names: Iterable[str]) -> str:
    return "{" + ",".join(sorted(names)) + "}"


def _shape(value: NDArray[Any]) -> str:
    return "[" + ",".join(map(str, value.shape)) + "]"


def _dtype_name(value: NDArray[Any]) -> str:
    return f"DT_{dtype_of(value).name}"
