"""How far the answers of a bundle are from the source graph's, where numbers are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.errors import VerificationError
from exporter.verify.outputs import _difference

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([INF, -INF, 1.0], [INF, -INF, 1.0], 0.0),
        ([INF, 1.0], [1.0, 1.0], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, 1.0], [1.0, INF], INF),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
    ],
)
@pytest.mark.parametrize("kind", [np.float32, np.complex64])
def test_a_number_that_is_not_finite_differs_from_others(
    expected: list[float], found: list[float], difference: float, kind: type
) -> None:
    assert _difference(np.array(expected, kind), np.array(found, kind), "scores") == difference


def test_an_answer_that_is_no_number_is_refused() -> None:
    with pytest.raises(VerificationError, match="not a number"):
        _difference(np.array([1.0]), np.array([NAN]), "scores")
