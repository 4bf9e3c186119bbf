"""What a manifest says about its log: where a base or delta stands in it, and which trainer state it is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from exporter.delta.deviation import Rounded
from exporter.delta.format import Schema
from exporter.errors import SchemaChanged
from exporter.graph.origin import GraphOrigin
from exporter.increments.trained import TrainerVersion
from exporter.mapping.mapping_spec import MappingSpec, MappingSpecDocument
from exporter.options import Updates, option_of
from exporter.wire.json_documents import Count, DocumentError, Id, doc


class DeltaOrigin(StrEnum):
    """How a delta came to be."""

    INCREMENTS = "increments"
    COMPARISON = "comparison"
    MERGE = "merge"
    ROLLBACK = "rollback"
    RESUME = "resume"


class BaseDocument(Struct, frozen=True, omit_defaults=True):
    """`incremental` in the manifest of a base."""

    log: Annotated[Count, doc("the position of the base that its log began with")]
    trained: Annotated[TrainerVersion, doc("the trainer's state that it serves")]
    schema: Annotated[list[list[Any]], doc("name, dtype, shape and kind of each served variable")]
    recipe: Annotated[MappingSpecDocument, doc("how the next delta is made of a checkpoint")]
    updates: Annotated[Updates, doc("how its graph takes deltas")]
    state: Annotated[Id | None, doc("the state that it was merged from")] = None
    graph: Annotated[GraphOrigin | None, doc("what its graph was made from")] = None


class BaseEntry(Struct, frozen=True):
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
                cause="; ".join(f"{option_of(name)} was {was[name]}, is {now[name]}" for name in differing),
            )

    def document(self) -> BaseDocument:
        """What the manifest says of it."""
        schema, recipe = self.schema.to_json(), self.mapping_spec.document()
        return BaseDocument(self.log, self.trained, schema, recipe, self.updates, self.state, self.origin)

    @classmethod
    def of(cls, document: BaseDocument) -> BaseEntry:
        """What the manifest says.

        Raises:
            DocumentError: its schema or a rule is malformed.
        """
        try:
            schema = Schema.from_json(document.schema)
        except ValueError as error:
            raise DocumentError(f"manifest.incremental.schema: {error}") from error
        return cls(
            document.log,
            schema,
            MappingSpec.read(document.recipe),
            document.trained,
            document.updates,
            document.state,
            document.graph,
        )


class DeltaEntry(Struct, frozen=True, kw_only=True, rename={"exact_base": "only_from"}):
    """A delta's place in its log.

    `rounded` tells of the rows that this delta is about; those of all deltas so far are told of by `trained`.
    Earlier releases wrote no `before`: it is where their delta begins. See `Manifest.state_id` for `state`.
    """

    log: Annotated[Count, doc("the position of the base that its log began with")]
    schema: Annotated[Id, doc("the digest of the log's schema")]
    made: Annotated[DeltaOrigin, doc("how it came to be")]
    rows: Annotated[Count, doc("rows of all tables together")]
    parts: Annotated[Count, doc("how many publications it holds")] = 1
    exact_base: Annotated[bool, doc("true: it fits the position that it begins at alone")] = False
    back_to: Annotated[Count | None, doc("the position whose values came back; null: none")] = None
    before: Annotated[Count | None, doc("of a rollback: the position that resuming leads back to")] = None
    state: Annotated[Id | None, doc("of a merger: the state that its newest part leads to")] = None
    reason: Annotated[str | None, doc("of a rollback: why, in words; null or absent: nobody said")] = None
    canary: Annotated[bool, doc("of a rollback: resuming gives the log back to a canary")] = False
    rounded: Annotated[Rounded | None, doc("rows that were rounded for it; null: none")] = None
    trained: Annotated[TrainerVersion, doc("the trainer's state that it leads to")]

    def document(self) -> dict[str, Any]:
        """What the manifest says of it."""
        found = to_builtins(self)
        later = ("before", "state", "reason", "canary")  # left out where they say nothing
        silent = {name for name in later if found[name] is None or found[name] is False}
        return {name: value for name, value in found.items() if name not in silent}
