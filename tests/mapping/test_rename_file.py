"""Tables of names, and the lists that they are made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import UsageError
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import MappingRules, parse_renames, read_renames
from exporter.mapping.unmatched import find_unmatched
from tests.support.commands import export_model
from tests.support.values import catalog, graph, tensor, variable

TABLE = """\
# variable   tensor
a/kernel  x/w

  b/kernel\ty/w   # behind a blank
"""


def test_two_columns_and_comments() -> None:
    table = parse_renames(TABLE, Path("names"))
    assert {name: (entry.line, entry.tensor) for name, entry in table.entries.items()} == {
        "a/kernel": (2, "x/w"),
        "b/kernel": (4, "y/w"),
    }


NAMES = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="#"), min_size=1)


@given(variable=NAMES, tensor=NAMES)
def test_names_mean_themselves_whatever_they_hold(variable: str, tensor: str) -> None:
    r"""`.`, `*` and `\1` are no patterns in a table."""
    (rule,) = parse_renames(f"{variable} {tensor}", Path("names")).rules
    assert rule.apply(variable) == tensor
    assert rule.apply(f"{variable}x") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "line 1: expected a variable and a tensor, found 1"),
        ("\n# c\na b c", "line 3: expected a variable and a tensor, found 3"),
        ("a b\n\na c", "line 3: 'a' is in line 1 already"),
    ],
)
def test_lines_that_are_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_renames(text, Path("names"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "binary"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_renames(path)


def test_names_that_are_not_there() -> None:
    served, stored = graph(variable("a", 2)), catalog(tensor("x", 2))
    parse_renames("a x", Path("names")).check(served, stored)
    with pytest.raises(UsageError, match=r"line 2: the graph has no variable 'b'"):
        parse_renames("\nb x", Path("names")).check(served, stored)
    with pytest.raises(UsageError, match=r"line 1: .* has no tensor 'y'"):
        parse_renames("a y", Path("names")).check(served, stored)


def test_both_lists_and_a_table() -> None:
    served = graph(variable("same", 2), variable("a/w", 3, 2), variable("a/b", 2), variable("c", 9))
    stored = catalog(tensor("same", 2), tensor("old/w", 3, 2), tensor("old/b", 2), tensor("old/d", 2))
    found = find_unmatched(served, stored, MappingRules())
    assert found.matched == 1
    assert [item.variable.key for item in found.variables] == ["a/w", "a/b", "c"]
    assert {ref.name for ref in found.tensors} == {"old/w", "old/b", "old/d"}
    assert found.table == ("a/w old/w", "# a/b old/b | old/d", "# c (nothing has its shape)")
    assert "3 of 4" in found.reason


def test_the_table_completes_the_mapping() -> None:
    served = graph(variable("a/w", 3, 2), variable("a/b", 2))
    stored = catalog(tensor("old/w", 3, 2), tensor("old/b", 2))
    table = parse_renames("\n".join(find_unmatched(served, stored, MappingRules()).table), Path("names"))
    rules = MappingRules(renames=table.rules)
    assert [source.tensor.name for source in build_mapping(served, stored, rules).sources] == [
        "old/w",
        "old/b",
    ]
    left = find_unmatched(served, stored, rules)
    assert (left.variables, left.matched, left.reason) == ((), 2, "")


def test_inspect_unmatched(ranker_graph: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **{"some/bias": np.zeros(8, np.float32), "other": np.zeros(3)})
    ran = export_model("inspect", tmp_path / "m.npz", "--unmatched", ranker_graph)
    assert ran.code == 0, ran.err
    assert "variable without a tensor" in ran.out
    assert "some/bias float32[8]" in ran.out
    document = export_model("inspect", tmp_path / "m.npz", "--unmatched", ranker_graph, "--json").document
    assert document["format_version"] == 1
    assert document["matched"] == 0
    assert {entry["name"] for entry in document["tensors"]} == {"some/bias", "other"}
    assert all(entry.keys() == {"name", "dtype", "shape", "candidates"} for entry in document["variables"])


def test_options_that_need_another(ranker_graph: Path, tmp_path: Path) -> None:
    ran = export_model("inspect", ranker_graph, "--rename", tmp_path / "names")
    assert ran.code == 2
    assert "--unmatched" in ran.err
