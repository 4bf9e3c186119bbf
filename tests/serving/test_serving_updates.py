"""What an update's status means: who has to do something about it?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from exporter.errors import CallFailed
from serving.client import Metadata, Prediction
from serving.updates import Updated, call_until_there, update


@pytest.mark.parametrize(
    ("status", "is_stuck"),
    [
        ("current: at 7", False),
        ("reached: 7", False),
        ("passed: at 7, beyond 5", False),
        ("hold: not beyond 7; at 7", False),
        ("hold: its file cannot be read; still at 7", True),
        ("gap: no delta leads on from 7", True),
        ("unlisted: /models/m/deltas/00000000000000000001 cannot be listed; at 7", True),
        ("damaged: 00000000000000000007-00000000000000000009 cannot be read", True),
        ("interrupted: an update to 9 died half-way; still at 7", True),
    ],
)
def test_a_model_that_cannot_go_on_is_stuck(status: str, is_stuck: bool) -> None:
    assert Updated(1, 7, 70, 0, 0, status).is_stuck is is_stuck


@pytest.mark.parametrize(
    ("status", "up_to", "was_merged"),
    [
        ("merged: with a call for 7; call again", -1, True),
        ("merged: with a call for 7; call again", 9, True),
        ("reached: 7", 9, True),
        ("passed: at 7, beyond 5", 9, True),
        ("reached: 7", -1, True),
        ("unpublished: nothing leads to 99; at 7", -1, True),
        ("reached: 7", 7, False),
        ("passed: at 7, beyond 5", 5, False),
        ("unpublished: nothing leads to 9; at 7", 9, False),
        ("current: at 7", -1, False),
        ("gap: no delta leads on from 7", -1, False),
        ("unlisted: /models/m/deltas/00000000000000000001 cannot be listed; at 7", -1, False),
    ],
)
def test_a_call_that_was_merged_is_made_again(status: str, up_to: int, was_merged: bool) -> None:
    assert Updated(1, 7, 70, 0, 0, status).was_merged(up_to) is was_merged


class Answers:
    """A client whose server gives these answers one after the other: (position, status), or a refusal."""

    address, model = "server:8500", "m"
    deadline_s = 10.0

    def __init__(self, *answers: tuple[int, str] | str) -> None:
        self.left = list(answers)

    def metadata(self, version: int | None) -> Metadata:
        return Metadata({"incremental_update": None}, 1)

    def predict_as(
        self, read: Callable[[Prediction], Updated], inputs: object, *, signature: str, version: int
    ) -> Updated:
        answer = self.left.pop(0)
        if isinstance(answer, str):
            raise CallFailed("INVALID_ARGUMENT", "refused", cause=answer)
        numbers = dict.fromkeys(("step", "rows", "deltas"), np.array([1]))
        outputs = {"position": np.array([answer[0]]), "status": np.array([answer[1].encode()]), **numbers}
        return read(Prediction(outputs, 1))


def ask(answers: Answers, up_to: int) -> Updated:
    return update(answers, up_to=up_to, version=1)  # type: ignore[arg-type]  # only what `update` calls


def test_calls_go_on_until_what_was_asked_for() -> None:
    done = ask(
        Answers(
            (102, "reached: 102"), (102, "merged: with a call for 102; call again"), (105, "reached: 105")
        ),
        105,
    )
    assert (done.position, done.deltas) == (105, 3)
    done = ask(Answers((102, "reached: 102"), (110, "current: at 110")), -1)
    assert done.position == 110


def test_a_call_for_the_newest_outlives_the_target_of_another() -> None:
    refused = "INVALID_ARGUMENT: assertion failed: [unpublished: nothing leads to 999; at 110]"
    assert ask(Answers(refused, (110, "current: at 110")), -1).position == 110
    with pytest.raises(CallFailed) as caught:
        ask(Answers(refused), 999)
    assert caught.value.cause == refused


def test_a_target_that_cannot_be_reached_is_an_error_also_where_the_call_succeeds() -> None:
    with pytest.raises(CallFailed) as caught:
        ask(Answers((110, "unpublished: nothing leads to 999; at 110")), 999)
    assert caught.value.cause == "INVALID_ARGUMENT: unpublished: nothing leads to 999; at 110"


def test_a_call_that_is_always_merged_ends_in_an_error() -> None:
    with pytest.raises(CallFailed, match="merged 20 calls"):
        ask(Answers(*[(102, "reached: 102")] * 20), 105)


ANOTHER_RUNS = "merged: another update runs; call again"


def test_a_call_beside_another_update_is_made_until_its_turn_comes() -> None:
    """Waiting is no merging: it is counted by the deadline alone."""
    done = ask(Answers(*[(100, ANOTHER_RUNS)] * 8, (105, "reached: 105")), 105)
    assert (done.position, done.deltas) == (105, 1)


def test_another_update_that_never_ends_is_no_refusal() -> None:
    answers = Answers(*[(100, ANOTHER_RUNS)] * 1000)
    answers.deadline_s = 0.1
    with pytest.raises(CallFailed, match=r"another update of m ran on server:8500 for 0\.1 s") as caught:
        ask(answers, 105)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert call_until_there(answers, -1, 1).found_another  # type: ignore[arg-type]  # only what it calls
