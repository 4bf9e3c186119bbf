"""An option is declared once, and stands wherever options stand: here one that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.graph.source_graph import GraphRequest
from exporter.options import (
    STORAGE,
    DataMode,
    ExportRequest,
    Jobs,
    Option,
    Updates,
    Verify,
    arguments,
    declared,
    digest_fields,
    option_of,
    require_company,
)

PLAIN = ExportRequest(Path("train"), Path("model"))

MADE_UP = """
import json, sys
from typing import Annotated
from exporter import options

class ExportRequest(options.ExportRequest, frozen=True):
    sparkle: Annotated[int, options.Option("Made up.", options.STORAGE, metavar="N", digest="if given")] = 0

options.ExportRequest = ExportRequest
import typer
from exporter.cli import app, export_commands
from exporter.training.exports import ExportArguments
from tools.reference import commands

seen = []
export_commands.run_full = lambda request, *_, **__: seen.append(request)
try:
    app.main(["--ckpt-dir", "train", "--out", "model", "--model", "m.py:f", "--sparkle", "3"])
except SystemExit:
    pass
(request,) = seen
root = typer.main.get_command(app.app)
(option,) = [one for one in root.params if one.name == "sparkle"]
print(json.dumps({
    "field": request.sparkle,
    "help": [option.help, option.rich_help_panel, option.metavar],
    "page": commands.page(app.app, "export-model"),
    "digest": options.digest_fields(request),
    "argv": ExportArguments.of(request).rest,
    "plain": options.digest_fields(ExportRequest(request.ckpt_dir, request.out)),
}))
"""


def test_an_option_that_is_declared_once_stands_everywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MADE_UP],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["field"] == 3
    assert found["help"] == ["Made up.", STORAGE, "N"]
    assert "`--sparkle N`" in found["page"] or "--sparkle" in found["page"]
    assert "Made up." in found["page"]
    assert "--sparkle=3" in found["argv"]
    assert found["digest"]["sparkle"] == 3
    assert found["plain"] == digest_fields(PLAIN), "what was published before it was there is not recognised"


def test_digests_of_earlier_releases_are_told_the_same() -> None:
    told = {"format": "saved_model", "data": "auto", "no_warmup": False, "verify": "files"}
    assert digest_fields(PLAIN) == {**told, "updates": None}
    baked = {
        "isolation": "snapshot",
        "snapshot_max_rows": 5,
        "stamp": True,
        "digest": False,
        "finite": False,
    }
    takes = replace(PLAIN, updates=Updates(snapshot_max_rows=5, stamp=True), verify=Verify.BYTES)
    assert digest_fields(takes) == {**told, "updates": baked, "verify": "bytes"}


def test_what_to_serve_may_be_given_by_position() -> None:
    request = ExportRequest(Path("train"), Path("model"), "my_model.py:serving", verify=Verify.BYTES)
    assert (request.model, request.verify) == ("my_model.py:serving", Verify.BYTES)
    asked = GraphRequest.of(request, "beside.meta")
    assert (asked.model, asked.is_found) == ("my_model.py:serving", False)
    found = GraphRequest.of(PLAIN, "beside.meta")
    assert (found.model, found.trust.is_found) == ("beside.meta", True)


def test_no_two_options_have_one_name() -> None:
    names = [one.name for one in declared(ExportRequest)]
    assert len(set(names)) == len(names) > 45


def test_options_say_what_a_request_says() -> None:
    request = replace(PLAIN, renames=("-a=b", "c=d"), inputs={"x": "X:0"}, data=DataMode.COPY, by_order=True)
    said = ["--input=x=X:0", "--rename=-a=b", "--rename=c=d", "--by-order", "--data=copy"]
    assert [*arguments(request)] == said
    assert [*arguments(Jobs(task_bytes=1 << 20))] == ["--engine=task-size=1048576B"]


def test_messages_name_an_option_without_the_place_of_its_value() -> None:
    assert option_of(Updates, "finite") == "--add nan-check"
    assert option_of(ExportRequest, "keep") == "--keep"
    assert option_of(ExportRequest, "keep_daily") == "--keep daily"
    assert option_of(ExportRequest, "min_freq") == "--keys min-freq"
    assert option_of(ExportRequest, "max_age_steps") == "--keys max-age-steps"


def test_words_set_fields_and_are_said_by_them() -> None:
    keep = next(one for one in declared(ExportRequest) if one.name == "--keep")
    request = replace(PLAIN, keep=5, keep_daily=7, verify=Verify.BYTES, check_graph=True)
    said = ["--keep=5", "--keep=daily=7", "--verify=bytes", "--verify=graph"]
    assert [*arguments(request)] == said
    assert keep.option.parse("--keep", ["5", "daily=7"]) == keep.value(request)
    with pytest.raises(UsageError, match="--keep names two of keep: 5 and 6"):
        keep.option.parse("--keep", ["5", "6"])
    with pytest.raises(UsageError, match="--keep daily goes with --keep N"):
        keep.option.parse("--keep", ["daily=7"])
    with pytest.raises(UsageError, match="--keep daily goes with --keep N"):
        ExportRequest("train", "model", keep_daily=7)
    with pytest.raises(UsageError, match="'daily' is not one of its words"):
        keep.option.parse("--keep", ["daily"])


@pytest.mark.parametrize(
    ("typed", "size"), [("100B", 100), ("64KiB", 1 << 16), ("3mib", 3 << 20), ("2GiB", 2 << 30)]
)
def test_a_size_is_read_in_its_unit(typed: str, size: int) -> None:
    (declaration,) = [one for one in declared(Jobs) if one.name == "--engine"]
    assert declaration.option.parse("--engine", [f"task-size={typed}"]) == {"task_bytes": size}


class Twin(Struct, frozen=True):
    alone: Annotated[bool, Option("Alone.")] = False
    either: Annotated[bool, Option("Either.", goes_with="--alone or --other")] = False
    other: Annotated[bool, Option("Other.")] = False


@pytest.mark.parametrize("given", [Twin(), Twin(alone=True, either=True), Twin(other=True, either=True)])
def test_company_is_what_one_of_several_options_gives(given: Twin) -> None:
    require_company([given])


def test_an_option_lacking_company_is_refused() -> None:
    with pytest.raises(UsageError, match="--either goes with --alone or --other"):
        require_company([Twin(either=True)])
