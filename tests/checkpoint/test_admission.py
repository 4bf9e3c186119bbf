"""Which keys are served: by frequency, by age, and what is said where nothing was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.admission import Admission, admitted
from exporter.checkpoint.embedding_variables import embedding_variables, read_keys
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.errors import UsageError
from tests.support.deeprec import Ev, write_full

KEYS = np.arange(0, 40, 2)
RECORDED = Ev(KEYS, np.ones((20, 1), np.float32), versions=KEYS * 10, freqs=KEYS % 7)


@pytest.mark.parametrize(
    ("admission", "expected"),
    [
        (Admission(), set(KEYS.tolist())),
        (Admission(min_freq=4), {key for key in KEYS.tolist() if key % 7 >= 4}),
        (Admission(max_age_steps=100), {key for key in KEYS.tolist() if key * 10 >= 400 - 100}),
        (Admission(5, 100), {key for key in KEYS.tolist() if key % 7 >= 5 and key >= 30}),
        (Admission(max_age_steps=0), set()),
    ],
)
def test_keys_are_chosen_by_frequency_and_age(
    tmp_path: Path, admission: Admission, expected: set[int]
) -> None:
    catalog = read_catalog(write_full(tmp_path / "m-400", {"t": RECORDED}, parts=3))
    variable = embedding_variables(catalog)["t"]
    admission.require_recorded(catalog, (variable,))
    mask = admitted(catalog, variable, admission, 400)
    keys = read_keys(catalog, variable)
    assert set(keys[slice(None) if mask is None else mask].tolist()) == expected


def test_a_table_without_records_is_served_whole_and_a_filter_that_does_nothing_is_refused(
    tmp_path: Path,
) -> None:
    bare = Ev(KEYS, RECORDED.values)
    catalog = read_catalog(write_full(tmp_path / "m-400", {"t": RECORDED, "bare": bare}, parts=2))
    variables = embedding_variables(catalog)
    assert admitted(catalog, variables["bare"], Admission(9, 0), 400) is None
    Admission(9, 0).require_recorded(catalog, tuple(variables.values()))
    for option, admission in (("--keys min-freq", Admission(9)), ("--keys max-age-steps", Admission(0, 3))):
        with pytest.raises(UsageError, match=option):
            admission.require_recorded(catalog, (variables["bare"],))
