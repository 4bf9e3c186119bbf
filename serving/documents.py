"""The documents that `serve-model --json` prints; the same rules hold as for `exporter.cli.documents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct


class ServedModel(Struct, frozen=True):
    """A model that `run` serves."""

    model: str
    """Its name in requests."""
    version: int
    """Its newest version that is available."""


class Serving(Struct, frozen=True):
    """What `run` prints when every model has an available version."""

    model: str | None
    """The first model's name in requests; null if a configuration lists none."""
    version: int | None
    """The version of it that is served."""
    models: Sequence[ServedModel]
    """All models, by name."""
    host: str
    """The address that the server listens on."""
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
    """The position at which the model is held."""


class ServedVersion(Struct, frozen=True):
    """A version on a server, and how far it is behind what is published."""

    version: int
    """Its number."""
    state: str
    """`START`, `LOADING`, `AVAILABLE`, `UNLOADING` or `END`."""
    code: str
    """The canonical status of its loading: `OK`, or what failed."""
    message: str
    """Why it failed; empty if it did not."""
    position: int | None
    """The position that it serves."""
    step: int | None
    """The training step of its values."""
    lineage: str | None
    """The log that its deltas are of."""
    behind_deltas: int | None
    """How many deltas an update would apply now; those beyond the hold are not counted."""
    behind_steps: int | None
    """Training steps from here to the newest position."""
    newer_version: int | None
    """A newer version that is published, and not served in its place yet."""
    published: datetime | None
    """When the values that it serves were published."""
    age_seconds: float | None
    """How long ago that was."""
    event_time: datetime | None
    """When the newest event happened that those values were trained on."""
    event_age_seconds: float | None
    """How long ago that was."""
    unsettled: int | None
    """Its responses of no one position since it was loaded; null: it does not count them."""
    problem: str | None
    """Why something is not known."""


class ModelStatus(Struct, frozen=True):
    """What `status` prints."""

    address: str
    """The server's address."""
    model: str
    """The model's name there."""
    published: Published | None
    """What is published; null without `--published`."""
    versions: Sequence[ServedVersion]
    """The versions, as the server lists them."""


class PredictDocument(Struct, frozen=True):
    """What every document of `predict` begins with."""

    model: str
    """The model's name."""
    version: int
    """The version that answered."""
    signature: str
    """The signature that was asked."""


class RowPrediction(PredictDocument, frozen=True):
    """What `predict` prints for a request with `instances`."""

    predictions: Any
    """An item for each row, as TF Serving's REST interface has it."""


class ColumnPrediction(PredictDocument, frozen=True):
    """What `predict` prints for a request with `inputs`."""

    outputs: Any
    """Each output by name, or the output itself if there is only one."""


class ExampleResults(PredictDocument, frozen=True):
    """What `predict` prints for a request with `examples` to a classify or regress signature."""

    results: Any
    """For each example a list of label and score, or a number."""


class Update(Struct, frozen=True):
    """What `update` prints."""

    address: str
    """The server's address."""
    model: str
    """The model's name there."""
    version: int
    """The version that was updated."""
    position: int
    """Where it stands now."""
    step: int
    """The training step of its values."""
    rows: int
    """Rows that were written."""
    deltas: int
    """Deltas that were applied."""
    status: str
    """Why it stopped there, in the model's words; the first word tells: `reached`, `current`, `hold`, ..."""
    loading: int | None
    """A newer version that was not available in time, and was not updated."""


class ReloadedModel(Struct, frozen=True):
    """A model of the configuration that a server took."""

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
    """The models that it serves."""


class AgentStarted(Struct, frozen=True):
    """The first document of `agent`."""

    what: Literal["started"]
    """It has begun."""
    host: str
    """The address of its status page and metrics."""
    port: int
    """Their port."""


class AgentEvent(Struct, frozen=True):
    """What `agent` prints of each thing that happens."""

    what: str
    """What it is about: `applied`, `failed`, `refused`, `canary`, `approved`, `golden`, `rolled_back`, ..."""
    message: str
    """The same for people."""
    model: str
    """The model's name; empty if it is about none."""
    replica: str | None
    """The model server's address."""
    version: int | None
    """The version on that server."""
    position: int | None
    """The position that it serves now."""
    step: int | None
    """The training step of its values."""
    rows: int | None
    """Rows that were written."""
    deltas: int | None
    """Deltas that were applied."""
    seconds: float | None
    """How long the call took."""
    behind_seconds: float | None
    """From the publication of the delta until it was served."""
    event_age_seconds: float | None
    """From the newest event that it was trained on until it was served."""
    at: datetime
    """When it happened."""
