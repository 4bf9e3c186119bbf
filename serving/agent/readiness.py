"""Decide whether a server may get requests: it serves a version, and has caught up once since it started.

    | the newest available version of the server       | the server is                                    |
    |--------------------------------------------------|--------------------------------------------------|
    | none, or the server does not respond             | not ready                                        |
    | takes no deltas, or none are visible             | ready                                            |
    | lacks deltas, and takes them                     | not ready until it is where they led at first    |
    | lacks deltas, and refuses them or stands still   | ready: it is as far as anything good reaches     |
    | was ready, and is not at an earlier position     | ready, whatever is published                     |
    | was ready at a later position                    | one that restarted: as if it never was ready     |

All replicas share the published model. A damaged delta, a directory that cannot be read or a hold stops all
of them at once, while each answers as well as before: none of that makes a ready server unready, or keeps a
starting one unready. This module reads no clock, file or network.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from exporter.publish.model import Model
from exporter.publish.served import Served
from serving.agent.rollout import Observed


class Readiness(Struct, frozen=True):
    """The state of one server; the default is the state of one that does not respond, and may be restarting.

    `version` is the newest available one, as last seen. `goal` is the position at which a server that is not
    ready becomes ready. `was_sent` is True if a call to bring the version further has failed.
    """

    is_ready: bool = False
    version: Served | None = None
    goal: int | None = None
    was_sent: bool = False

    def sent_in_vain(self, version: int) -> Readiness:
        """Return the readiness after a call to this version that neither applied a delta nor got a reason.

        It is unchanged if another version was seen last.
        """
        is_it = self.version is not None and self.version.number == version
        return replace(self, was_sent=True) if is_it else self

    def seen(self, observed: Observed, published: Model) -> Readiness:
        """Return the readiness after the server reported its versions and positions in `observed`.

        `published` are the logs, limited to the deltas that the server may apply.
        """
        before, now = self.version, observed.served
        if now is None:
            return Readiness()
        if self.is_ready and not _went_back(before, now):
            return Readiness(True, now)
        newest, good = _reach(now, observed, published)
        is_same = before is not None and before.number == now.number
        goal = self.goal if is_same and self.goal is not None else newest
        stands_still = self.was_sent and before is not None and _place(before) == _place(now)
        if now.position is None or now.position >= min(goal, good) or stands_still:
            return Readiness(True, now)
        return Readiness(False, now, goal)


def _place(version: Served) -> tuple[int, int | None]:
    return version.number, version.position


def _went_back(before: Served | None, now: Served) -> bool:
    """Return True if `now` has a lower version or position than `before`, which only a restart can cause.

    False without a version before.
    """
    if before is None or now.number != before.number:
        return before is not None and now.number < before.number
    return now.position is not None and before.position is not None and now.position < before.position


def _reach(version: Served, observed: Observed, published: Model) -> tuple[int, int]:
    """Return two positions that a version can reach: by all visible deltas, and without the refused ones.

    `observed` has the server's refusals, `published` the visible logs. Without a visible log both are the
    version's present position.
    """
    log, at = published.logs.get(version.lineage), version.position or 0
    if log is None:
        return at, at
    refused = [refusal.delta for refusal in observed.refusals if refusal.lineage == version.lineage]
    ways = (log.reach(at), log.reach(at, without=refused))
    newest, good = (way[-1].end if way else at for way in ways)
    return newest, good
