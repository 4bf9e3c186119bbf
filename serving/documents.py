"""The documents that `serve-model --json` prints; they follow the rules of `exporter.cli.documents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct

from exporter.newer_python import StrEnum
from exporter.publish.hold import HeldBy


class ServedModel(Struct, frozen=True):
    """A model that `run` serves."""

    model: str
    """Its name in requests."""
    version: int
    """Its newest available version."""
    tables: str | None = None
    """`mapped`, of a copy `mapped from ` its original, or `restored: ` and why; null: none to be mapped."""


class Serving(Struct, frozen=True):
    """The document of `run`, printed when every model has an available version."""

    model: str | None
    """The first model's name in requests; null if a configuration lists none."""
    version: int | None
    """The served version of that model."""
    models: Sequence[ServedModel]
    """All models, sorted by name."""
    host: str
    """The address on which the server listens."""
    port: int
    """Its gRPC port."""
    rest_port: int | None
    """Its REST port; null without `--rest-api-port`."""


class Published(Struct, frozen=True):
    """The published model under `--model-base-path`."""

    position: int | None
    """The newest position; null if it cannot be read."""
    step: int | None
    """The training step of its values."""
    hold: int | None
    """The position of the hold; null without one."""
    held_by: HeldBy | None
    """The author, time and reason of the hold; null if they are not recorded."""


class ServedVersion(Struct, frozen=True):
    """A version on a server, and its distance from the published model."""

    version: int
    """Its number."""
    state: str
    """`START`, `LOADING`, `AVAILABLE`, `UNLOADING` or `END`."""
    code: str
    """The canonical status of loading it: `OK`, or the code of the failure."""
    message: str
    """The reason why loading failed; empty if it did not."""
    position: int | None = None
    """The position that it serves."""
    step: int | None = None
    """The training step of its values."""
    lineage: str | None = None
    """The log to which its deltas belong."""
    behind_deltas: int | None = None
    """The number of deltas that an update would apply now, up to the hold."""
    behind_steps: int | None = None
    """Training steps from here to the newest position."""
    newer_version: int | None = None
    """A newer published version that the server does not serve yet."""
    published: datetime | None = None
    """The publication time of the values that it serves."""
    age_seconds: float | None = None
    """Seconds since then."""
    event_time: datetime | None = None
    """The time of the newest event in the training data of those values."""
    event_age_seconds: float | None = None
    """Seconds since then."""
    unsettled: int | None = None
    """The number of its responses since loading that may mix positions; null: it does not count them."""
    tables: str | None = None
    """`mapped`, or `restored: ` and why, and how full their overlay is; null: none were to be mapped."""
    overlay_percent: int | None = None
    """The fill of the fullest overlay of changed rows, among those that can fill up; null as for `tables`."""
    problem: str | None = None
    """The reason why a field is unknown; null if there is none."""


class ModelStatus(Struct, frozen=True):
    """The document of `status`."""

    address: str
    """The server's address."""
    model: str
    """The model's name on the server."""
    published: Published | None
    """The published model; null without `--model-base-path`."""
    versions: Sequence[ServedVersion]
    """The versions, as the server lists them."""


class PredictDocument(Struct, frozen=True):
    """The first fields of every document of `predict`."""

    model: str
    """The model's name."""
    version: int
    """The version that computed the values."""
    signature: str
    """The signature that computed them."""


class RowPrediction(PredictDocument, frozen=True):
    """The document of `predict` for a request with `instances`."""

    predictions: Any
    """An item for each row, as in TF Serving's REST interface."""


class ColumnPrediction(PredictDocument, frozen=True):
    """The document of `predict` for a request with `inputs`."""

    outputs: Any
    """Each output by name, or the output itself if there is only one."""


class Form(StrEnum):
    """The form in which an example of a request is written."""

    JSON = "json"
    CURL = "curl"
    PYTHON = "python"


class RequestExample(PredictDocument, frozen=True):
    """The document of `predict --example`."""

    request: Any
    """A request that fits the signature, in the JSON of REST."""
    text: str
    """The same request in the form of `--as`."""


class ExampleResults(PredictDocument, frozen=True):
    """The document of `predict` for a request with `examples` to a classify or regress signature."""

    results: Any
    """For each example a list of labels and scores, or a number."""


class Update(Struct, frozen=True):
    """The document of `update`."""

    address: str
    """The server's address."""
    model: str
    """The model's name on the server."""
    version: int
    """The version that was updated."""
    position: int
    """The position that it serves now."""
    step: int
    """The training step of its values."""
    rows: int
    """Rows that were written."""
    deltas: int
    """Deltas that were applied."""
    status: str
    """The reason why it stopped, as a code: `reached`, `current`, `hold`, ..."""
    message: str
    """The reason why it stopped, as the model reports it."""
    loading: int | None
    """A newer version that was not available in time, so that it was not updated; null if there is none."""


class ReloadedModel(Struct, frozen=True):
    """A model of the configuration that a server accepted."""

    model: str
    """Its name in requests."""
    versions: Sequence[int]
    """Its available versions, the newest first."""
    labels: Mapping[str, int]
    """The version that each label names."""


class Reload(Struct, frozen=True):
    """The document of `reload`."""

    address: str
    """The server's address."""
    models: Sequence[ReloadedModel]
    """The models that it serves now."""


class AgentStarted(Struct, frozen=True):
    """The first document of `agent`."""

    what: Literal["started"]
    """The agent has started."""
    host: str
    """The address of its status page and metrics."""
    port: int
    """Their port."""


class FleetFinding(Struct, frozen=True):
    """A finding about a model, or about one of its replicas."""

    model: str
    """The model's name."""
    level: str
    """Its severity: `bad`, `warning`, `busy` or `good`."""
    state: str
    """Its kind, in a word or two."""
    text: str
    """The finding as a sentence."""
    details: str
    """Its cause, or more details; may be empty."""
    command: str
    """The command that helps; may be empty."""
    code: str
    """Its stable code; see [findings](findings.md)."""


class AgentStatus(Struct, frozen=True):
    """The document that the agent's port serves as `/status.json`."""

    at: str
    """The time of this state, in ISO 8601."""
    models: Sequence[Mapping[str, Any]]
    """Each model with its publications, its replicas and their versions, its canary and its store."""
    findings: Sequence[FleetFinding]
    """The findings, the worst first; empty if all is well."""
