"""What a manifest says about its log: where a base or delta stands in it, and which trainer state it is."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from exporter.delta.deviation import Rounded, rounded_of
from exporter.delta.format import Schema
from exporter.errors import SchemaChanged
from exporter.graph.origin import GraphOrigin
from exporter.increments.increment import HEX
from exporter.increments.trained import TrainerVersion
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import Isolation, Updates
from exporter.wire.json_fields import FieldError, Fields


class DeltaOrigin(StrEnum):
    """How a delta came to be."""

    INCREMENTS = "increments"
    COMPARISON = "comparison"
    MERGE = "merge"
    ROLLBACK = "rollback"
    RESUME = "resume"


@dataclass(frozen=True)
class BaseEntry:
    """A base that takes deltas: its log, what they look like, and how the next one is made.

    `updates` says how the graph of the base takes them. `state` is that of the delta whose values a base was
    made of, if it was made of deltas. `origin` is what its graph was made from; None if that was not kept.
    """

    log: int
    schema: Schema
    mapping_spec: MappingSpec
    trained: TrainerVersion
    updates: Updates
    state: str | None = None
    origin: GraphOrigin | None = None

    def check_updates(self, given: Updates | None) -> None:
        """Compare how the base takes deltas with what a later command line says, which may leave it all out.

        Raises:
            SchemaChanged: they differ; only another base can take them otherwise.
        """
        if given is None or given == Updates():
            return
        was, now = asdict(self.updates), asdict(given)
        differing = [name for name in was if was[name] != now[name]]
        if differing:
            raise SchemaChanged(
                "the base was exported with other update options",
                cause="; ".join(f"{name} was {was[name]}, is {now[name]}" for name in differing),
            )

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        return {
            "log": self.log,
            "trained": self.trained.to_json(),
            "schema": self.schema.to_json(),
            "recipe": self.mapping_spec.to_json(),
            "updates": asdict(self.updates),
            **({} if self.state is None else {"state": self.state}),
            **({} if self.origin is None else {"graph": self.origin.to_json()}),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> BaseEntry:
        """The entry that `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        try:
            schema = Schema.from_json(fields.document.get("schema"))
        except ValueError as error:
            raise FieldError(f"{fields.where}.schema: {error}") from error
        return cls(
            fields.integer("log"),
            schema,
            MappingSpec.from_fields(fields.object("recipe")),
            TrainerVersion.from_fields(fields.object("trained")),
            _updates(fields.object("updates")),
            _state(fields),
            GraphOrigin.from_fields(fields.object("graph")) if "graph" in fields.document else None,
        )


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """A delta's place in its log. `schema` is the digest of the log's; `parts` counts merged publications.

    `back_to` is the position whose values a rollback or resumption restored, `before` the one that
    resuming leads back to; earlier releases did not say that: it is where their delta begins. `rounded` tells
    of the rows that this delta is about; those of all deltas so far are told of by `trained`. `state` is, for
    a merger, that of its newest part: see `exporter.publish.manifest.Manifest.state_id`.
    """

    log: int
    schema: str
    made: DeltaOrigin
    rows: int
    trained: TrainerVersion
    parts: int = 1
    exact_base: bool = False
    back_to: int | None = None
    rounded: Rounded | None = None
    before: int | None = None
    state: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        return {
            "log": self.log,
            "schema": self.schema,
            "made": self.made.value,
            "rows": self.rows,
            "parts": self.parts,
            "only_from": self.exact_base,
            "back_to": self.back_to,
            **({} if self.before is None else {"before": self.before}),
            **({} if self.state is None else {"state": self.state}),
            "rounded": None if self.rounded is None else self.rounded.to_json(),
            "trained": self.trained.to_json(),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> DeltaEntry:
        """The entry that `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        return cls(
            fields.integer("log"),
            fields.text("schema", HEX),
            DeltaOrigin(fields.text("made", _MADE)),
            fields.integer("rows"),
            TrainerVersion.from_fields(fields.object("trained")),
            fields.integer("parts"),
            fields.document.get("only_from") is True,
            fields.or_null(fields.integer, "back_to"),
            rounded_of(fields),
            fields.integer("before") if fields.document.get("before") is not None else None,
            _state(fields),
        )


def _state(fields: Fields) -> str | None:
    return None if fields.document.get("state") is None else fields.text("state", HEX)


def _updates(fields: Fields) -> Updates:
    return Updates(
        Isolation(fields.text("isolation", _ISOLATION)),
        fields.integer("snapshot_max_rows"),
        fields.document.get("stamp") is True,
        fields.document.get("digest") is True,
        fields.document.get("finite") is True,
    )


_ISOLATION = re.compile("|".join(isolation.value for isolation in Isolation))
_MADE = re.compile("|".join(made.value for made in DeltaOrigin))
