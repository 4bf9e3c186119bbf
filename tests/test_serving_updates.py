"""What an update's status means: who has to do something about it?"""

from __future__ import annotations

import pytest

from serving.updates import Updated


@pytest.mark.parametrize(
    ("status", "is_stuck"),
    [
        ("current: at 7", False),
        ("reached: 7", False),
        ("passed: at 7, beyond 5", False),
        ("hold: not beyond 7; at 7", False),
        ("hold: its file cannot be read; still at 7", True),
        ("gap: no delta leads on from 7", True),
        ("damaged: 00000000000000000007-00000000000000000009 cannot be read", True),
        ("interrupted: an update to 9 died half-way; still at 7", True),
    ],
)
def test_a_model_that_cannot_go_on_is_stuck(status: str, is_stuck: bool) -> None:
    assert Updated(1, 7, 70, 0, 0, status).is_stuck is is_stuck
