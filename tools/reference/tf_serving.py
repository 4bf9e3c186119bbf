"""The page that compares `serve-model run` with TensorFlow Serving: calls, flags, statuses."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct

from serving.status import Code
from serving.stock_flags import (
    REFUSED,
    STOCK_FLAGS,
    SWITCHES_WITHOUT_EFFECT,
    VALUES_WITHOUT_EFFECT,
    StockFlag,
)
from tools.reference import rest
from tools.reference.markdown import code, table, text


class Match(Enum):
    """How something here compares with TensorFlow Serving."""

    SAME = "same"
    DIFFERENT = "different on purpose"
    ABSENT = "absent"


class Call(Struct, frozen=True):
    """Something that a server can be asked."""

    name: str
    match: Match = Match.SAME
    note: str = ""


class Outcome(Struct, frozen=True):
    """What a call ends in under a condition, there and here."""

    call: str
    when: str
    there: str
    here: Code
    why: str = ""

    @property
    def match(self) -> Match:
        """Whether it is the same status."""
        return Match.SAME if self.there == self.here.name else Match.DIFFERENT


GRPC_CALLS = (
    Call("PredictionService/Predict"),
    Call("PredictionService/Classify"),
    Call("PredictionService/Regress"),
    Call("PredictionService/MultiInference"),
    Call("PredictionService/GetModelMetadata"),
    Call(
        "ModelService/GetModelStatus",
        Match.DIFFERENT,
        "with a version label it tells that version's status; there, the label is not looked at",
    ),
    Call(
        "ModelService/HandleReloadConfigRequest",
        Match.DIFFERENT,
        "what is refused changes nothing; without a deadline it waits ten minutes. There, an entry without "
        "a platform is refused and kept: every later call fails with its error until a restart. And where a "
        "new model's base path never comes, later calls hang behind it: `serve-model reload` looks before "
        "it sends",
    ),
    Call(
        "SessionService/SessionRun", Match.ABSENT, "TensorFlow Serving's own binary does not offer it either"
    ),
)
"""Every method of the services in TensorFlow Serving's API."""

OTHER_CALLS = (
    Call(
        "grpc.health.v1.Health/Check",
        Match.DIFFERENT,
        "always on; `NOT_SERVING` until every model has an available version; each model is a service, too",
    ),
    Call("grpc.health.v1.Health/Watch", Match.ABSENT, "gRPC's clients take that for healthy"),
    Call("tensorflow.ProfilerService", Match.ABSENT),
    Call("gRPC server reflection", Match.ABSENT, "there, too"),
    Call("GET /v1/models/NAME[/versions/V]"),
    Call("GET /v1/models/NAME[/versions/V]/metadata"),
    Call("POST /v1/models/NAME[/versions/V]:predict", note="by rows and by columns"),
    Call("POST /v1/models/NAME[/versions/V]:classify"),
    Call("POST /v1/models/NAME[/versions/V]:regress"),
    Call("GET /monitoring/prometheus/metrics", note="requests and latencies under the same names"),
)

_INVALID, _MISSING, _PRECONDITION = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION
_TOO_MANY = "a client's mistake: there the first values count"
_LIMIT = "60 bytes must not cost gigabytes: --max-filled-bytes"


def _same(call: str, when: str, code: Code) -> Outcome:
    return Outcome(call, when, code.name, code)


OUTCOMES = (
    _same("Predict", "no `model_spec`, or no name in it", _INVALID),
    _same("Predict", "the model is not served, or none of its versions is available", _MISSING),
    _same("Predict", "the version is not available", _MISSING),
    _same("Predict", "the label is not known", _INVALID),
    _same("Predict", "the signature is not known", _PRECONDITION),
    _same("Predict", "the signature has another method name", Code.OK),
    _same("Predict", "that, with --enable_signature_method_name_check", Code.INTERNAL),
    _same("Predict", "inputs are missing, or unknown", _INVALID),
    _same("Predict", "an input has another type", _INVALID),
    _same("Predict", "a tensor does not fill its shape", _INVALID),
    Outcome("Predict", "a tensor has more values than its shape, in fields", "OK", _INVALID, _TOO_MANY),
    Outcome("Predict", "a shape has more than 64 MiB, and one value", "OK", _INVALID, _LIMIT),
    _same("Predict", "an output in `output_filter` is unknown, or named twice", _INVALID),
    _same("Predict", "the deadline is over while it computes", Code.DEADLINE_EXCEEDED),
    _same("Classify", "no example", _INVALID),
    _same("Classify", "the signature is not known", _INVALID),
    _same("Classify", "the signature has no input `inputs`, or neither `classes` nor `scores`", _INVALID),
    _same("Classify", "the signature is named predict, as in TensorFlow 2", Code.OK),
    _same("Classify", "that, with --enable_signature_method_name_check", _INVALID),
    _same("Classify", "an example lacks a feature", _INVALID),
    _same("Classify", "the output is no matrix", _INVALID),
    _same("Regress", "the signature has no output `outputs`, or several", _INVALID),
    _same("Regress", "the output is neither a vector nor a column", _INVALID),
    _same("MultiInference", "no task", _INVALID),
    _same("MultiInference", "tasks name several models, or a signature twice", _INVALID),
    _same("MultiInference", "signatures with input tensors of their own, as in TensorFlow 2", Code.OK),
    _same("MultiInference", "a task is neither classify nor regress", Code.UNIMPLEMENTED),
    _same("GetModelMetadata", "no field, or another than `signature_def`", _INVALID),
    _same("GetModelMetadata", "the model is not served", _MISSING),
    _same("GetModelStatus", "the model, or the version, was never seen", _MISSING),
    _same("GetModelStatus", "the version failed to load: END with its error", Code.OK),
    _same("GetModelStatus", "the model was taken out of the configuration: END", Code.OK),
    _same("HandleReloadConfigRequest", "it is no list of models", _INVALID),
    _same("HandleReloadConfigRequest", "a model is listed twice", _INVALID),
    _same("HandleReloadConfigRequest", "a base path is relative", _INVALID),
    _same("HandleReloadConfigRequest", "no platform, or another than `tensorflow`", _INVALID),
    _same("HandleReloadConfigRequest", "another platform for a model that is served", _INVALID),
    Outcome("HandleReloadConfigRequest", "a model has no name", "OK", _INVALID, "no request could ask it"),
    Outcome(
        "HandleReloadConfigRequest",
        "a base path in an object store",
        "OK",
        _INVALID,
        "only local paths are served",
    ),
    _same("HandleReloadConfigRequest", "a label for a version that is not available now", _PRECONDITION),
    _same("HandleReloadConfigRequest", "a new model cannot be loaded; it stays configured", Code.UNKNOWN),
    _same(
        "HandleReloadConfigRequest",
        "a base path is not there at the deadline; it is waited for",
        Code.DEADLINE_EXCEEDED,
    ),
)
"""Statuses, in the order of the calls. A test makes each of these requests with the stock stubs."""

_PAGE = """\
# Beside TensorFlow Serving

`serve-model run` is a server for development and CI. It answers TensorFlow Serving's own clients, takes its
flags and configuration files, and runs models in the same C++ session. It compares with TensorFlow
Serving {version}: *same*, *different on purpose*, or *absent*. Tests make each call with the stubs of
`tensorflow-serving-api`, and provoke each status.

## Calls

{calls}
## Flags

These flags of its `main.cc` have the same effect here. Dashes may stand for underscores where `--help-all`
has an option of the name.

{flags}
{ignored} have no effect in an embedded server, and are taken with a note. {refused} are refused, unless they
are empty or false. Any other flag is an error.

## Statuses

What gRPC clients get. Messages say the same, mostly in the same words, and are cut after 1,024 characters
as there.

{outcomes}
## REST

For a status of gRPC, REST answers with the HTTP status that TensorFlow Serving gives for it.

{rest}
## Behaviour

{behaviour}"""

BEHAVIOUR = (
    ("where it listens", Match.DIFFERENT, "127.0.0.1 unless `--host` says otherwise; there 0.0.0.0"),
    ("when it listens", Match.DIFFERENT, "at once; there when all models are available"),
    ("a base path that is not there yet", Match.SAME, "it is waited for"),
    ("models that are not available at start", Match.DIFFERENT,
     "it ends after `--wait` seconds, or at once if none can be loaded; `inf` waits as there"),
    ("versions that come and go", Match.SAME, "the new one is loaded first, then the old one unloaded"),
    ("a version that fails to load", Match.DIFFERENT,
     "END at once, and tried again when its directory changes; there tried five times, a minute apart"),
    ("a `saved_model.pb` that is cut off", Match.DIFFERENT, "END with DATA_LOSS; there OUT_OF_RANGE"),
    ("a SavedModel whose variables are missing", Match.DIFFERENT, "it fails; there it is served"),
    ("a version directory without a model in it", Match.DIFFERENT, "waited for; there it fails"),
    ("a base path that changes", Match.SAME, "a loaded version of the same number stays"),
    ("a configuration file that is read again", Match.SAME,
     "it wins over what `HandleReloadConfigRequest` set; what is wrong with it changes nothing"),
    ("labels", Match.SAME, "checked before anything is loaded"),
    ("warm-up", Match.SAME, "at most 1,000 records; one that fails keeps the version from serving"),
    ("batching of requests", Match.ABSENT, "and what it demands of inputs"),
    ("base paths in object stores", Match.ABSENT, ""),
    ("logging of requests (`logging_config`)", Match.ABSENT, "not looked at"),
    ("GPUs", Match.DIFFERENT, "used if `CUDA_VISIBLE_DEVICES` names them"),
)  # fmt: skip


def page() -> str:
    """The page."""
    return _PAGE.format(
        version="2.21",
        calls=table(
            ("call", "here", "note"),
            ((code(call.name), call.match.value, text(call.note)) for call in (*GRPC_CALLS, *OTHER_CALLS)),
        ),
        flags=table(("flag", "note"), map(_flag_row, STOCK_FLAGS)),
        ignored=_listed((*SWITCHES_WITHOUT_EFFECT, *VALUES_WITHOUT_EFFECT)),
        refused=_listed(REFUSED),
        outcomes=table(("call", "when", "there", "here", "why"), map(_outcome_row, OUTCOMES)),
        rest=rest.section(),
        behaviour=table(("what", "here", "note"), ((text(a), b.value, text(c)) for a, b, c in BEHAVIOUR)),
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = (code(f"--{name}") for name in names)
    return f"{', '.join(others)} and {last}"


def _flag_row(flag: StockFlag) -> tuple[str, str]:
    note = flag.why
    if flag.own not in ("--flag", f"--{flag.name.replace('_', '-')}"):
        note = f"`{flag.own}`" + (f"; {note}" if note else "")
    return code(f"--{flag.name}"), text(note)


def _outcome_row(outcome: Outcome) -> tuple[str, str, str, str, str]:
    there = "" if outcome.match is Match.SAME else code(outcome.there)
    return (
        code(outcome.call),
        text(outcome.when),
        there or "same",
        code(outcome.here.name),
        text(outcome.why),
    )
