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
    """`mapped`, of a copy ` from ` the original, or `restored: ` and why; null: not made to be mapped."""


class Serving(Struct, frozen=True):
    """What `run` prints when every model has an available version."""

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
    """What is published under `--published`."""

    position: int | None
    """The newest position."""
    step: int | None
    """The training step of its values."""
    hold: int | None
    """The position at which a hold stops the model; null without one."""
    held_by: HeldBy | None
    """Who set the hold, when and why; null if nothing says so."""


class ServedVersion(Struct, frozen=True):
    """A version on a server, and how far it is behind what is published."""

    version: int
    """Its number."""
    state: str
    """`START`, `LOADING`, `AVAILABLE`, `UNLOADING` or `END`."""
    code: str
    """The canonical status of loading it: `OK`, or the code of the failure."""
    message: str
    """Why loading failed; empty if it did not."""
    position: int | None = None
    """The position that it serves."""
    step: int | None = None
    """The training step of its values."""
    lineage: str | None = None
    """The log that its deltas belong to."""
    behind_deltas: int | None = None
    """How many deltas an update would apply now, up to the hold."""
    behind_steps: int | None = None
    """Training steps from here to the newest position."""
    newer_version: int | None = None
    """A newer published version that the server does not serve yet."""
    published: datetime | None = None
    """When the values that it serves were published."""
    age_seconds: float | None = None
    """Seconds since then."""
    event_time: datetime | None = None
    """The time of the newest event that those values were trained on."""
    event_age_seconds: float | None = None
    """Seconds since then."""
    unsettled: int | None = None
    """Its responses of no one position since it was loaded; null: it does not count them."""
    tables: str | None = None
    """`mapped`, or `restored: ` and why, and how full their overlay is; null: none were to be mapped."""
    overlay_percent: int | None = None
    """How full the fullest overlay of changed rows is, of those that can fill up; null as for `tables`."""
    problem: str | None = None
    """Why a field is unknown."""


class ModelStatus(Struct, frozen=True):
    """What `status` prints."""

    address: str
    """The server's address."""
    model: str
    """The model's name on the server."""
    published: Published | None
    """What is published; null without `--published`."""
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
    """What `predict` prints for a request with `instances`."""

    predictions: Any
    """An item for each row, as TF Serving's REST interface has it."""


class ColumnPrediction(PredictDocument, frozen=True):
    """What `predict` prints for a request with `inputs`."""

    outputs: Any
    """Each output by name, or the output itself if there is only one."""


class Form(StrEnum):
    """How an example of a request is written."""

    JSON = "json"
    CURL = "curl"
    PYTHON = "python"


class RequestExample(PredictDocument, frozen=True):
    """What `predict --example` prints."""

    request: Any
    """A request that the signature takes, in the JSON of REST."""
    text: str
    """The same as `--as` asks for it."""


class ExampleResults(PredictDocument, frozen=True):
    """What `predict` prints for a request with `examples` to a classify or regress signature."""

    results: Any
    """For each example a list of labels and scores, or a number."""


class Update(Struct, frozen=True):
    """What `update` prints."""

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
    """Why it stopped, as a code: `reached`, `current`, `hold`, ..."""
    message: str
    """Why it stopped, in the model's words."""
    loading: int | None
    """A newer version that was not available in time, so it was not updated."""


class ReloadedModel(Struct, frozen=True):
    """A model of the configuration that a server accepted."""

    model: str
    """Its name in requests."""
    versions: Sequence[int]
    """Its available versions, the newest first."""
    labels: Mapping[str, int]
    """The version that each label names."""


class Reload(Struct, frozen=True):
    """What `reload` prints."""

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
    """Something to say about a model, or about one of its replicas."""

    model: str
    """The model's name."""
    level: str
    """How bad it is."""
    state: str
    """What it is, in a word or two."""
    text: str
    """What there is to say."""
    details: str
    """More of it; may be empty."""
    command: str
    """The command that helps; may be empty."""
    code: str
    """What it is, in a word that does not change; [what each means](findings.md)."""


class AgentStatus(Struct, frozen=True):
    """What the agent's port serves as `/status.json`."""

    at: str
    """When this was so, in ISO 8601."""
    models: Sequence[Mapping[str, Any]]
    """Each model with what is published, its replicas and their versions, its canary and its store."""
    findings: Sequence[FleetFinding]
    """What there is to say, the worst first; empty if all is well."""
