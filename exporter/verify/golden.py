"""Golden requests: questions to a model, the permitted answers, and their distance from earlier answers.

    {"requests": [{"name": "a known user",
                   "signature_name": "serving_default",
                   "instances": [{"user": 7, "item": 3}],
                   "expect": {"score": {"min": 0, "max": 1},
                              "logits": {"near": [[0.2, 1.4]], "tolerance": 0.5, "drift": 0.1}}}]}

A request has the form of TF Serving's REST interface for Predict: `instances` or `inputs`. A delta is judged
by comparing the answers after it with the answers before it: a gate that failed before is not counted against
the delta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace
from numpy.typing import NDArray

from exporter.errors import UsageError
from exporter.storage.files import read_regular
from exporter.storage.layout import SAVED_MODEL_FILE
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import is_floating
from exporter.wire.protos import Proto, message_class
from exporter.wire.rest_json import predict_inputs

_LONGEST = 16 << 20
_LONGEST_MODEL = 1 << 31  # readers of protocol buffers accept no more
_SHOWN = 3
_DEFAULT_SIGNATURE = "serving_default"
Outputs = Mapping[str, NDArray[Any]]


class Expectation(Struct, frozen=True, forbid_unknown_fields=True):
    """The least and greatest value of an output, or its greatest distance from `near`.

    None sets no bound. `near` is a number, or nested lists of the output's shape; `tolerance` is the greatest
    distance of each value from it. `drift`: see `Gates`.
    """

    min: float | None = None
    max: float | None = None
    near: Any = None
    tolerance: float | None = None
    drift: float | None = None


class GoldenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request, and the bounds of its outputs by name."""

    name: str = ""
    signature_name: str = _DEFAULT_SIGNATURE
    instances: Any = UNSET
    inputs: Any = UNSET
    expect: dict[str, Expectation] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """The request as TF Serving's REST interface takes it: `instances` or `inputs`, under that key.

        It has both keys, or neither, if the file gives both or neither; `read_golden` refuses such a request.
        """
        given = {"instances": self.instances, "inputs": self.inputs}
        return {name: value for name, value in given.items() if not isinstance(value, UnsetType)}


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[GoldenRequest]


class Answer(Struct, frozen=True):
    """A server's answer: outputs by name, or the reason of its refusal."""

    outputs: Outputs = field(default_factory=dict)
    refused: str = ""


class GateFailure(Struct, frozen=True):
    """A gate that an answer did not pass; two failures of one `kind` are about the same gate."""

    request: str
    gate: str
    output: str
    text: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """The request, gate and output that failed, whatever the values were."""
        return self.request, self.gate, self.output

    def __str__(self) -> str:
        where = f", output {self.output!r}" if self.output else ""
        return f"{self.request}{where}: {self.text}"


class Gates(Struct, frozen=True):
    """The gates that a canary's answers must pass.

    `drift` is the permitted movement of scores, relative to their size. An output of floats drifts by the
    mean distance of its values from the earlier ones, over the mean of their absolute values. An output that
    was all zeros is not compared.
    """

    requests: tuple[GoldenRequest, ...]
    drift: float | None = None

    def failures(self, answers: Sequence[Answer], before: Sequence[Answer] | None) -> tuple[GateFailure, ...]:
        """Return the gates that `answers` fail and that `before` passed, and the outputs that drifted.

        `before` are earlier answers. Both have one answer for each request, in order. `before` is None if
        unknown: then every failed gate is returned, and drift is not measured. Raises ValueError for another
        number of answers.
        """
        known = set() if before is None else {failure.kind for failure in self.wrong(before)}
        new = tuple(failure for failure in self.wrong(answers) if failure.kind not in known)
        return new if before is None else new + self.drifted(answers, before)

    def wrong(self, answers: Sequence[Answer]) -> tuple[GateFailure, ...]:
        """Return the gates that the answers fail, whatever earlier answers were.

        There is one answer for each request, in order. Raises ValueError for another number of answers.
        """
        pairs = zip(self.requests, answers, strict=True)
        return tuple(failure for request, answer in pairs for failure in _wrong(request, answer))

    def drifted(self, answers: Sequence[Answer], before: Sequence[Answer]) -> tuple[GateFailure, ...]:
        """Return the outputs of floats that moved further from the earlier answers than permitted.

        An output whose shape changed is returned, too. Both arguments have one answer for each request, in
        order. Outputs that either answer lacks, that were all zeros, or for which no drift is limited, are
        not compared. How movement is measured is said at the class. Raises ValueError for another number of
        answers.
        """
        triples = zip(self.requests, answers, before, strict=True)
        return tuple(
            failure
            for request, now, old in triples
            for failure in _drifted(request, now.outputs, old.outputs, self.drift)
        )


def summary(failures: Sequence[GateFailure]) -> str:
    """Return the first three failures and the number of the others as text for people; "" for no failures."""
    left = len(failures) - _SHOWN
    return "; ".join(map(str, failures[:_SHOWN])) + (f"; and {left} more" if left > 0 else "")


def read_golden(path: Path) -> tuple[GoldenRequest, ...]:
    """Read the golden requests in a JSON file, in order; those without a name are named "request N", from 1.

    Raises:
        UsageError: it cannot be read, holds no requests, two have one name, or one is wrong; the cause
            says which.
        LfsPointer: it is a pointer of Git LFS.
    """
    try:
        requests = msgspec.json.decode(read_regular(path, _LONGEST), type=_File).requests
        named = tuple(
            request if request.name else replace(request, name=f"request {number}")
            for number, request in enumerate(requests, 1)
        )
        if not named:
            raise ValueError("it holds no requests")
        # failures are told apart by the request's name
        if len({request.name for request in named}) < len(named):
            raise ValueError("two requests have the same name")
        for request in named:
            _check(request)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UsageError(
            f"the golden requests in {path} cannot be used",
            cause=str(error),
            hint="name their file; their form is in docs/canary.md",
        ) from error
    return named


def check_signatures(requests: Sequence[GoldenRequest], version: Path) -> None:
    """Compare requests and expected outputs with the signatures of the published version in a directory.

    The signatures are those of the graph tagged `serve`; the graph is not run.

    Raises:
        UsageError: one does not fit, so that no server can ever answer it as expected; or the version has
            no readable SavedModel.
        CheckpointError: the SavedModel is a pointer of Git LFS, or cannot be fetched from its store.
    """
    signatures = _signatures(version)
    for request in requests:
        problem = _misfit(request, signatures)
        if problem:
            raise UsageError(
                f"golden request {request.name!r} does not fit {version}",
                cause=problem,
                hint=f"compare it with the signatures: export-model inspect {quoted(version)}",
            )


def _signatures(version: Path) -> Mapping[str, Proto]:
    try:
        content = read_regular(version / SAVED_MODEL_FILE, _LONGEST_MODEL)
        saved_model = message_class("SavedModel").FromString(content)
    except (OSError, ValueError, DecodeError) as error:
        raise UsageError(
            f"{version} has no signatures to compare golden requests with", cause=str(error)
        ) from error
    for meta_graph in saved_model.meta_graphs:
        if "serve" in meta_graph.meta_info_def.tags:
            return dict(meta_graph.signature_def)
    return {}


def _misfit(request: GoldenRequest, signatures: Mapping[str, Proto]) -> str:
    signature = signatures.get(request.signature_name)
    if signature is None:
        return f"it has no signature {request.signature_name!r}, but {', '.join(sorted(signatures))}"
    unknown = sorted(request.expect.keys() - set(signature.outputs))
    if unknown:
        return f"there is no output {unknown[0]!r}, but {', '.join(sorted(signature.outputs))}"
    try:
        predict_inputs(request.document, signature)
    except ValueError as error:
        return str(error)
    return ""


def _check(request: GoldenRequest) -> None:
    if len(request.document) != 1:
        raise ValueError(f"{request.name!r}: expected either 'instances' or 'inputs'")
    for name, expected in request.expect.items():
        where = f"{request.name!r}, output {name!r}"
        if (expected.near is None) != (expected.tolerance is None):
            raise ValueError(f"{where}: 'near' and 'tolerance' go together")
        if expected.near is not None:
            try:
                near = np.asarray(expected.near, np.float64)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{where}: 'near' is not a number or a list of numbers") from None
            if not np.isfinite(near).all():
                raise ValueError(f"{where}: 'near' is not finite")
        for limit in (expected.tolerance, expected.drift):
            if limit is not None and not limit >= 0:
                raise ValueError(f"{where}: 'tolerance' and 'drift' are not negative")
        if expected.min is not None and expected.max is not None and expected.min > expected.max:
            raise ValueError(f"{where}: 'min' is above 'max'")


def _wrong(request: GoldenRequest, answer: Answer) -> Iterator[GateFailure]:
    """Yield the gates that one answer fails, whatever earlier answers were.

    A refused request fails only the gate "answer".
    """

    def failure(gate: str, output: str, text: str) -> GateFailure:
        return GateFailure(request.name, gate, output, text)

    if answer.refused:
        yield failure("answer", "", answer.refused)
        return
    for name, values in answer.outputs.items():
        numbers = _floats(values)
        if numbers is not None and not np.isfinite(numbers).all():
            many = int(np.sum(~np.isfinite(numbers)))
            yield failure("finite", name, f"{many} of {numbers.size} values are NaN or infinite")
    for name, expected in request.expect.items():
        if name not in answer.outputs:
            yield failure("range", name, "there is no such output")
            continue
        numbers = _numbers(answer.outputs[name])
        if numbers is None:
            yield failure("range", name, "its values are not numbers")
            continue
        text = _out_of_range(numbers, expected)
        if text:
            yield failure("range", name, text)


def _out_of_range(numbers: NDArray[np.float64], expected: Expectation) -> str:
    if expected.min is not None and (low := numbers[numbers < expected.min]).size:
        return f"{_value(low.min())} is below {_value(expected.min)}"
    if expected.max is not None and (high := numbers[numbers > expected.max]).size:
        return f"{_value(high.max())} is above {_value(expected.max)}"
    if expected.near is None or expected.tolerance is None:
        return ""
    near = np.asarray(expected.near, np.float64)
    if near.ndim and near.shape != numbers.shape:
        return f"its shape is {list(numbers.shape)}, expected {list(near.shape)}"
    distance = np.abs(numbers - near)
    if not distance.size or not (worst := float(np.max(distance))) > expected.tolerance:
        return ""
    return f"{_value(worst)} away from what is expected, {_value(expected.tolerance)} is allowed"


def _drifted(
    request: GoldenRequest, now: Outputs, before: Outputs, drift: float | None
) -> Iterator[GateFailure]:
    for name, values in now.items():
        expected = request.expect.get(name)
        allowed = drift if expected is None or expected.drift is None else expected.drift
        numbers, old = _floats(values), _floats(before[name]) if name in before else None
        if allowed is None or numbers is None or old is None:
            continue
        if numbers.shape != old.shape:
            text = f"its shape is {list(numbers.shape)}, it was {list(old.shape)}"
            yield GateFailure(request.name, "drift", name, text)
            continue
        size = float(np.mean(np.abs(old))) if old.size else 0.0
        if size and (found := float(np.mean(np.abs(numbers - old))) / size) > allowed:
            text = f"scores moved by {_value(found)} of their size, {_value(allowed)} is allowed"
            yield GateFailure(request.name, "drift", name, text)


def _floats(values: NDArray[Any]) -> NDArray[np.float64] | None:
    return values.astype(np.float64) if is_floating(values) else None


def _numbers(values: NDArray[Any]) -> NDArray[np.float64] | None:
    floats = _floats(values)
    return values.astype(np.float64) if floats is None and values.dtype.kind in "iub" else floats


def _value(number: float) -> str:
    return f"{number:.4g}" if math.isfinite(number) else str(number)
