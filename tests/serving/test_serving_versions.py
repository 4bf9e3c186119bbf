"""Which version is served: the decisions, without files or TensorFlow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.model_config import Every, Latest, Load, Specific, Unload, next_action, versions_among
from serving.status import VersionState

A, L, U, E = VersionState.AVAILABLE, VersionState.LOADING, VersionState.UNLOADING, VersionState.END


def wanted(*versions: int) -> frozenset[int]:
    return frozenset(versions)


def test_whole_numbers_are_versions() -> None:
    names = [
        "1",
        "0",
        "007",
        "-1",
        "+5",
        "1_000",
        "1.0",
        " 3",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "x",
        ".staging-1",
        "deltas",
        "9" * 19,
        str((1 << 63) - 1),
    ]
    assert versions_among(names) == {0: "0", 1: "1", 7: "007", (1 << 63) - 1: str((1 << 63) - 1)}


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (Latest(), {30}),
        (Latest(2), {20, 30}),
        (Latest(0), {30}),
        (Every(), {10, 20, 30}),
        (Specific(wanted(10, 99)), {10}),
    ],
)
def test_policies(policy: Latest | Every | Specific, chosen: set[int]) -> None:
    assert policy.choose([10, 30, 20]) == chosen


@pytest.mark.parametrize("policy", [Latest(), Every(), Specific(wanted(1))])
def test_nothing_to_choose_from(policy: Latest | Every | Specific) -> None:
    assert policy.choose([]) == frozenset()


@pytest.mark.parametrize(
    ("versions", "states", "action"),
    [
        (wanted(), {}, None),
        (wanted(1), {}, Load(1)),
        (wanted(1), {1: A}, None),
        (wanted(2), {1: A}, Load(2)),
        (wanted(2), {1: A, 2: L}, None),
        (wanted(2), {1: A, 2: E}, None),
        (wanted(2), {1: A, 2: A}, Unload(1)),
        (wanted(3), {1: A, 2: A, 3: A}, Unload(1)),
        (wanted(3), {1: U, 3: A}, None),
        (wanted(1), {1: U}, None),
        (wanted(), {1: A}, Unload(1)),
        (wanted(1), {2: A}, Load(1)),
        (wanted(1, 2), {}, Load(2)),
        (wanted(1, 2), {2: A}, Load(1)),
    ],
)
def test_the_next_action(
    versions: frozenset[int], states: dict[int, VersionState], action: Load | Unload | None
) -> None:
    assert next_action(versions, states) == action


numbers = st.integers(0, 6)


@given(st.sets(numbers), st.dictionaries(numbers, st.sampled_from([A, E])), st.sets(numbers))
def test_the_model_stays_available(
    chosen: set[int], states: dict[int, VersionState], broken: set[int]
) -> None:
    """Whatever is loaded and whatever cannot be: the steps end, and never empty a model that is wanted."""
    versions = frozenset(chosen)
    states = dict(states)
    available = {v for v, s in states.items() if s is A}
    for _ in range(20):
        action = next_action(versions, states)
        if action is None:
            break
        if isinstance(action, Load):
            assert action.version in versions
            states[action.version] = E if action.version in broken else A
        else:
            assert action.version not in versions
            del states[action.version]
        if available and versions:
            assert any(s is A for s in states.values())
    else:
        pytest.fail("no end of steps")
    loadable = versions - broken - {v for v, s in states.items() if s is E}
    if loadable or not versions:
        assert {v for v, s in states.items() if s is A} <= versions
    assert loadable <= {v for v, s in states.items() if s is A}
