"""Statuses of `incremental_update`: why an update of a model that takes deltas stopped at its position.

A status is `<word>: <why>`. The graph of each base contains these words, so that they never change: servers
may run bases of earlier releases, and clients of earlier releases read the words of newer bases. A client
treats a word that it does not know as a refusal.
"""

from __future__ import annotations

from exporter.newer_python import StrEnum


class UpdateStatus(StrEnum):
    """The first word of a status, its meaning, and its remedy.

    With an explicit target everything but `reached`, `passed` and `merged` is an error that carries the
    status, unless the call was merged with calls for other targets: these get the status, not the error.
    """

    meaning: str
    remedy: str

    def __new__(cls, word: str, meaning: str, remedy: str) -> UpdateStatus:
        """Return a member whose value is `word`, with its meaning and remedy for the documentation."""
        status = str.__new__(cls, word)
        status._value_ = word
        status.meaning, status.remedy = meaning, remedy
        return status

    REACHED = (
        "reached",
        "The model is at the wanted position; several deltas may have been applied on the way.",
        "Nothing.",
    )
    CURRENT = (
        "current",
        "Nothing is published beyond the position.",
        "Nothing. If something was published, the server reads another directory, or a copy that lags.",
    )
    PASSED = ("passed", "The model is beyond the wanted position; nothing was done.", "Nothing.")
    HOLD = (
        "hold",
        "The log is held, and a call for the newest position goes no further. If the file `hold` cannot be "
        "read, no server moves by itself.",
        "`export-model history MODEL` shows the hold, `export-model resume MODEL` lifts it.",
    )
    GAP = (
        "gap",
        "There are later deltas, but none of them begins at the position or before it.",
        "`export-model verify MODEL` names what is missing. A copy may lack deltas: pull again. A server "
        "that was stopped for long may need the newest base: let it load the newest version.",
    )
    INSIDE = (
        "inside",
        "The wanted position is between the ends of the deltas that fit: they were merged.",
        "Ask for another position, or for the newest: `export-model history MODEL` lists the positions.",
    )
    UNPUBLISHED = (
        "unpublished",
        "Nothing is published up to the wanted position.",
        "Ask for a position that is published, or publish it first.",
    )
    UNLISTED = (
        "unlisted",
        "Neither the log's directory nor the model's lists anything: the model was moved or unmounted, and "
        "what is published is unknown. (An unreadable log below a readable model counts as an empty one: "
        "`current`.)",
        "Mount the volume, or make the directory readable for the server's user: see "
        "`export-model doctor MODEL`.",
    )
    MERGED = (
        "merged",
        "Another update runs, or a server that batches requests merged the call with one for a smaller "
        "target.",
        "Call again; `serve-model update` does.",
    )
    INTERRUPTED = (
        "interrupted",
        "An earlier update died half-way, and no delta reaches its target.",
        "Call again when deltas reach that far: the next update repairs the values. Or publish a new base.",
    )
    DAMAGED = (
        "damaged",
        "A delta cannot be read, or a checksum is wrong.",
        "`export-model doctor MODEL` names it, and the command that helps.",
    )
    FORMAT = (
        "format",
        "A delta has a format or flags that this base does not know.",
        "Publish a new base with this release: the same export with `--new-base always --again`.",
    )
    LINEAGE = (
        "lineage",
        "A delta belongs to another log.",
        "`export-model verify MODEL`: a directory was copied from another model, or renamed.",
    )
    SCHEMA = ("schema", "A delta was made for other variables.", "As for `lineage`.")
    RANGE = ("range", "A delta's name differs from the positions inside it.", "As for `lineage`.")
    ONLY_FROM = (
        "only-from",
        "A delta that leaves rows out or rounds them fits only its first position, and the model is at "
        "another.",
        "As for `gap`.",
    )
    ROWS = (
        "rows",
        "A delta's rows are not rows of the table, or not as many as it declares.",
        "As for `damaged`.",
    )
    FINITE = (
        "finite",
        "A delta has NaN or infinity, and the base was exported with `--add nan-check`.",
        "`export-model doctor MODEL` names the command that helps.",
    )
    OVERLAY = (
        "overlay",
        "A delta changes more rows of a mapped table than its overlay has room for.",
        "Let the server load the newest base, whose overlay is empty. If it serves that one: publish "
        "another, by the same export with `--new-base always --again`, or with a larger `--overlay-rows`.",
    )


# The beginning of a status after a call that did nothing, because another update was under way.
ANOTHER_RUNS = f"{UpdateStatus.MERGED.value}: another update runs"

# The beginning of a status if the hold cannot be read.
UNREADABLE_HOLD = f"{UpdateStatus.HOLD.value}: its file cannot be read"
