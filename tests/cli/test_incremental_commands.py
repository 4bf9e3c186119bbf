"""The commands that work on a log, as their users meet them, and each way an input is bad."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.delta_files import write_delta
from exporter.delta.format import DeltaHeader
from exporter.publish.delta_log import list_deltas, read_log
from exporter.publish.staging import remove_leftovers
from tests.support.commands import Ran, export_model
from tests.support.damage import INDEX, SHARD, flip, truncate
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    served_now,
    set_hold,
    values_at,
)
from tests.support.setting import Setting, followed

SERVING = Serving(parts=2, cast=True)


class Log(Setting):
    """Published: a base at 10, deltas to 20 and 30; the trainer has written an increment to 40."""

    @property
    def delta(self) -> Path:
        """The newest delta."""
        return self.deltas[-1]

    @property
    def increment(self) -> Path:
        """The newest increment."""
        return sorted((self.train / "increments").glob("0*"))[-1]

    def export(self, *options: object) -> Ran:
        return export_model("--ckpt-dir", self.train, "--out", self.model, "--incr", "--json", *options)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    directory = tmp_path_factory.mktemp("origin")
    trainer = followed(directory, (20, 30, 40), published=30, serving=SERVING, parts=3)
    return directory, trainer


@pytest.fixture
def setting(origin: tuple[Path, Trainer], tmp_path: Path) -> Log:
    shutil.copytree(origin[0], tmp_path / "copy")
    return Log(tmp_path / "copy")


def test_an_export_says_what_it_did(setting: Log, origin: tuple[Path, Trainer]) -> None:
    done = setting.export().document
    assert next(iter(done)) == "format_version"
    assert (done["from_position"], done["position"], done["step"]) == (30, 40, 40)
    assert done["increments"] == [setting.increment.name]
    assert (done["compares"], done["bytes_compared"]) == (False, 0)
    assert done["rows"] == 8
    assert Path(done["path"]) == setting.delta
    assert_same_bits(values_at(read_log(setting.model)), served_now(origin[1], SERVING))
    again = setting.export().document
    assert (again["path"], again["position"], again["rows"]) == (None, 40, 0)


def test_a_dry_run_writes_nothing_and_agrees_with_the_run(setting: Log) -> None:
    before = sorted(map(str, setting.model.rglob("*")))
    dry = setting.export("--dry-run").document
    assert sorted(map(str, setting.model.rglob("*"))) == before
    real = setting.export().document
    assert dry.pop("dry_run") is True
    assert (dry.pop("status"), real["status"]) == ("planned", "published")
    assert dry == {key: real[key] for key in dry}
    assert dry["listed_rows"] == real["rows"]


def test_a_dry_run_says_how_many_rows_or_why_it_does_not_know(
    setting: Log,
) -> None:
    arguments = ("--ckpt-dir", setting.train, "--out", setting.model, "--incr", "--dry-run")
    assert "\nrows          8, listed by 1 increment\n" in export_model(*arguments).out
    shutil.rmtree(setting.train / "increments")
    shown = export_model(*arguments)
    assert shown.code == 0, shown.err
    assert "rows          not known: a dry run does not compare them\n" in shown.out
    assert setting.export("--dry-run").document["listed_rows"] is None


def test_people_read_lines(setting: Log) -> None:
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, "--incr")
    assert ran.code == 0
    lines = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert lines["delta"].startswith("8 rows in ")
    assert lines["published"].startswith(str(setting.delta))


def test_merge_rollback_resume_and_verify_go_together(setting: Log) -> None:
    model = setting.model
    merged = export_model("merge", model, "--json").document
    assert (merged["from_position"], merged["position"], len(merged["merged"])) == (10, 30, 2)
    assert export_model("merge", model, "--json").document["path"] is None
    before = values_at(read_log(model))
    back = export_model("rollback", model, "--to", 20, "--json").document
    assert (back["values_of"], back["position"], back["hold"]) == (20, 31, 31)
    assert export_model("diff", f"{model}@20", model, "--exit-code", "-q").code == 0
    assert export_model("diff", f"{model}@30", model, "--exit-code", "-q").code == 10
    assert setting.export().document["position"] == 40, "publishing goes on beyond the hold"
    assert export_model("verify", model, "--json").document["hold"] == 31
    lifted = export_model("resume", model, "--json").document
    assert (lifted["path"], lifted["hold"]) == (None, None)
    assert export_model("rollback", model, "--to", 30, "-q").code == 0
    assert export_model("resume", model, "--json").document["values_of"] == 40
    verified = export_model("verify", model, "--bytes", "--json").document
    assert verified["positions"] == [10, 20, 30, 31, 40, 41, 42]
    assert verified["problems"] == []
    assert_same_bits(values_at(read_log(model), 30), before)


def test_diff_of_rows_that_are_no_numbers_names_no_largest(tmp_path: Path) -> None:
    for name, row in (("a-1", [1.0, 1.0]), ("b-2", [np.nan, 3.0])):
        with BundleWriter(tmp_path / name) as writer:
            writer.add("table", np.array([row], np.float32))
    (table,) = export_model("diff", tmp_path / "a-1", tmp_path / "b-2", "--json").document["variables"]
    assert (table["norm"], table["largest"]) == (None, None)


def test_diff_shows_rows_and_norms_of_checkpoints(setting: Log, tmp_path: Path) -> None:
    for name, value in (("a-1", 1.0), ("b-2", 4.0)):
        rows = np.zeros((5, 2), np.float32)
        rows[3] = value
        with BundleWriter(tmp_path / name) as writer:
            writer.add("table", rows)
            writer.add("same", np.ones(3, np.float32))
            writer.add("name", np.array(b"x", object))
            writer.add(f"only/{name}", np.ones(3, np.float32))
    found = export_model("diff", tmp_path / "a-1", tmp_path / "b-2", "--json").document
    (table,) = found["variables"]
    assert table == {
        "name": "table",
        "changed_rows": 1,
        "rows": 5,
        "norm": pytest.approx(18**0.5),
        "largest": 3.0,
    }
    assert (found["compared"], found["only_a"], found["only_b"]) == (3, ["only/a-1"], ["only/b-2"])
    said = export_model("diff", tmp_path / "a-1", tmp_path / "b-2").out.splitlines()
    assert [line.rpartition(", ")[2] for line in said[:2]] == ["step 1", "step 2"]
    assert export_model("diff", setting.model, setting.train, "--json").document["equal"] is False


# --- bad input ---------------------------------------------------------------------------------------------


def other_shape(setting: Log) -> None:
    trainer = Trainer(setting.train, parts=3, step=50)
    for name in [name for name in trainer.values if name.startswith("net/users")]:
        trainer.values[name] = np.zeros((24, 3), np.float32)
    trainer.save()


def other_checkpoint(setting: Log) -> None:
    shutil.rmtree(setting.train / "increments")
    Trainer(setting.train, parts=3, step=50, seed=9).save()


def plain_version_on_top(setting: Log) -> None:
    version = setting.model / "99"
    shutil.copytree(setting.model / "10", version)
    manifest = json.loads((version / "manifest.json").read_text())
    del manifest["incremental"]
    (version / "manifest.json").write_text(json.dumps(manifest | {"position": 99}))


def foreign_delta(setting: Log) -> None:
    log = read_log(setting.model)
    other_checkpoint(setting)
    newest = log.deltas[-1]
    header = DeltaHeader("0" * 32, log.schema.digest, newest.start, newest.end, 30)
    write_delta(newest.path / "delta", log.schema, header, log.open(newest).changes)


def missing_delta(setting: Log) -> None:
    other_checkpoint(setting)
    shutil.rmtree(list_deltas(setting.log)[0].path)


def damaged_delta(damage: Callable[[Path], None], name: str) -> Callable[[Log], None]:
    def spoil(setting: Log) -> None:
        other_checkpoint(setting)
        damage(setting.delta / name)

    return spoil


@dataclass(frozen=True)
class Bad:
    name: str
    spoil: Callable[[Log], None]
    error: str
    code: int


BAD = [
    Bad("increment truncated", lambda s: truncate(s.increment / SHARD), "TruncatedFile", 3),
    Bad("increment flipped", lambda s: flip(s.increment / SHARD), "CorruptFile", 3),
    Bad("increment without shard", lambda s: (s.increment / SHARD).unlink(), "MissingShard", 3),
    Bad("increment's index flipped", lambda s: flip(s.increment / INDEX), "CorruptFile", 3),
    Bad("increment's manifest flipped", lambda s: truncate(s.increment / "manifest.json"), "CorruptFile", 3),
    Bad("another shape", other_shape, "SchemaChanged", 5),
    Bad("a version that takes no deltas", plain_version_on_top, "NotUpdatable", 5),
    Bad("base's manifest", lambda s: truncate(s.model / "10/manifest.json"), "ManifestError", 6),
    Bad("base's shard", lambda s: _unlink_shards(s.model / "10/variables"), "MissingShard", 3),
    Bad("delta missing", missing_delta, "PositionUnknown", 5),
    Bad("delta truncated", damaged_delta(truncate, SHARD), "TruncatedFile", 3),
    Bad("delta flipped", damaged_delta(flip, SHARD), "CorruptFile", 3),
    Bad("delta's index flipped", damaged_delta(flip, INDEX), "CorruptFile", 3),
    Bad("delta of another log", foreign_delta, "ForeignLineage", 5),
]


def _unlink_shards(variables: Path) -> None:
    other_checkpoint(Log(variables.parent.parent.parent))
    for path in variables.glob("*.data-*"):
        path.unlink()


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_input_is_named_and_nothing_is_published(setting: Log, case: Bad) -> None:
    case.spoil(setting)
    before = sorted(path.name for path in setting.log.iterdir())
    ran = setting.export()
    assert (ran.error["error"], ran.code) == (case.error, case.code), ran.err
    assert ran.error["hint"]
    assert sorted(path.name for path in setting.log.iterdir()) == before


def test_after_a_version_without_deltas_the_same_options_would_not_help(setting: Log) -> None:
    plain_version_on_top(setting)
    assert "--new-base always" in setting.export().error["hint"]


def test_what_differs_in_a_changed_schema_is_said(setting: Log) -> None:
    other_shape(setting)
    ran = setting.export()
    assert "'s/users' has shape [23, 3] in the graph" in ran.error["message"]
    assert "[24, 3] in the checkpoint" in ran.error["message"]


def test_other_rules_than_the_base_has_are_refused(setting: Log) -> None:
    ran = setting.export("--average", "ema")
    assert (ran.error["error"], ran.code) == ("SchemaChanged", 5)
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, "--incr", "--average", "ema")
    assert "--average was not given, is 'ema'" in ran.err


def test_a_base_that_takes_deltas_in_another_way_is_not_silently_kept(setting: Log) -> None:
    ran = setting.export("--add=stamp", "--isolation", "row")
    assert (ran.error["error"], ran.code) == ("SchemaChanged", 5)
    assert "--new-base if-needed" in ran.error["hint"]
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, "--incr", "--add=stamp")
    assert "--add stamp was not given, is given" in ran.err
    assert "hint:  give --add stamp as it was, or begin a new log" in ran.err
    assert setting.export("--despite=deltas").code == 2
    assert setting.export().code == 0, "options that say nothing mean those of the base"


def test_caches_that_cannot_be_written_are_no_failure(setting: Log) -> None:
    other_checkpoint(setting)
    shutil.rmtree(setting.log / ".state", ignore_errors=True)
    (setting.log / ".state").write_text("in the way")
    ran = setting.export()
    assert ran.code == 0, ran.err
    assert ran.document["path"]


def test_options_of_incremental_exports_go_with_incr(setting: Log) -> None:
    for option in ("--new-base=merged", "--new-base=if-needed"):
        ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, option)
        assert ran.code == 2
        assert "goes with --incr" in ran.err


def test_a_rebase_is_reported_also_beside_nothing_to_do(setting: Log) -> None:
    done = setting.export("--new-base=merged").document
    assert done["status"] == "published"
    assert Path(done["new_base"]).name == str(done["position"])
    again = setting.export("--new-base=merged").document
    assert (again["status"], again["new_base"]) == ("nothing_to_do", None)


def test_a_rebase_alone_is_told_to_people(setting: Log) -> None:
    assert setting.export().code == 0
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, "--incr", "--new-base=merged")
    assert "nothing to do" in ran.out
    assert f"new base      {setting.model}/40: the base and 3 deltas" in ran.out


@pytest.mark.parametrize("file", ["saved_model.pb", "assets/incremental.json"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_rebase_carries_no_damage_of_the_old_base_on(setting: Log, file: str, how: str) -> None:
    """The new base's manifest would vouch for it."""
    path = setting.base / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    before = sorted(setting.model.iterdir())
    ran = export_model("merge", setting.model, "--rebase")
    assert (ran.code, f"{path} has" in ran.err) == (6, True), ran.err
    assert sorted(setting.model.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["999", "a-b", "1-2", f"{30:020d}-{20:020d}", f"{7:020d}-{10**19:020d}", "*"]
)
def test_hostile_names_among_the_deltas_are_passed_over(setting: Log, name: str) -> None:
    (setting.log / name).mkdir()
    (setting.log / f"{30:020d}-{90:020d}").write_text("a file")
    (setting.log / f"{30:020d}-{91:020d}").symlink_to("nowhere")
    assert setting.export().document["position"] == 40
    assert export_model("verify", setting.model, "-q").code == 0


def test_a_delta_that_was_replaced_by_a_link_is_one(setting: Log) -> None:
    """Servers follow it: an exporter that did not would publish the position once more."""
    elsewhere = setting.directory / "elsewhere"
    delta = setting.delta
    shutil.move(delta, elsewhere)
    delta.symlink_to(elsewhere)
    assert setting.export().document["position"] == 40
    assert [d.end for d in list_deltas(setting.log)] == [20, 30, 40]
    assert export_model("verify", setting.model, "-q").code == 0


def test_retention_removes_a_link_and_not_what_it_leads_to(setting: Log) -> None:
    elsewhere = setting.directory / "elsewhere"
    shutil.move(setting.delta, elsewhere)
    trash = setting.model / ".trash-link"
    trash.symlink_to(elsewhere)
    remove_leftovers(setting.model)
    assert not trash.is_symlink()
    assert (elsewhere / "manifest.json").exists()


@pytest.mark.parametrize("damage", ["shard", "manifest", "hold", "gap"])
def test_verify_names_what_is_wrong(setting: Log, damage: str) -> None:
    if damage == "shard":
        flip(setting.delta / SHARD)
    elif damage == "manifest":
        truncate(setting.delta / "manifest.json")
    elif damage == "hold":
        (setting.log / "hold").write_text("soon")
    else:
        shutil.rmtree(list_deltas(setting.log)[0].path)
    ran = export_model("verify", setting.model, "--json")
    expected = {"shard": 6, "manifest": 6, "hold": 6, "gap": 5}[damage]
    assert ran.code == expected
    assert len(ran.document["problems"]) >= 1
    assert ran.document["problems"][0]["error"] == ran.error["error"]
    if damage in ("shard", "gap"):
        assert "--new-base always" in ran.error["hint"], "a new base is what mends it"


def test_a_delta_that_servers_do_not_take_yet_names_the_hold(setting: Log) -> None:
    assert export_model("rollback", setting.model, "--to", 20, "-q").code == 0
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, "--incr")
    lines = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert lines["hold"].startswith("at 31")
    assert lines["to"] == f"lift it    export-model resume {setting.model}"
    assert setting.export().document["hold"] == 31


def test_a_version_is_no_model_base_path(setting: Log) -> None:
    version = setting.model / "10"
    before = sorted(version.iterdir())
    for incr in ((), ("--incr",)):
        ran = export_model("--ckpt-dir", setting.train, "--out", version, *incr)
        assert ran.code == 2
        assert f"{version} is itself a version" in ran.err
        assert f"the directory above it: {setting.model}" in ran.err
    assert sorted(version.iterdir()) == before
    beside = setting.model.with_name("link")
    beside.symlink_to(setting.model)
    for inside in (
        "10/variables",
        "10/new/er",
        "deltas",
        "deltas/new",
        f"deltas/{10:020d}/x",
        "999",
        "0012/x",
    ):
        for place in (setting.model / inside, beside / inside, setting.train / ".." / "model" / inside):
            for incr in ((), ("--incr",), ("--dry-run",)):
                ran = export_model("--ckpt-dir", setting.train, "--out", place, "--json", *incr)
                assert (ran.code, "lies in the published model" in ran.error["message"]) == (2, True), ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("rollback", "--to", "25"), 5, "nothing is published at position 25"),
        (("rollback", "--to", "30"), 2, "is the newest"),
    ],
)
def test_what_cannot_be_done_is_said(setting: Log, arguments: tuple[str, ...], code: int, words: str) -> None:
    name, *options = arguments
    ran = export_model(name, setting.model, *options)
    assert ran.code == code
    assert words in ran.err


def test_commands_on_nothing_say_so(tmp_path: Path) -> None:
    for name in ("merge", "resume", "verify"):
        ran = export_model(name, tmp_path)
        assert ran.code == 5
        assert "nothing is published" in ran.err


def test_a_hold_is_read_back(setting: Log) -> None:
    log = read_log(setting.model)
    set_hold(log, 20)
    assert log.hold.read() == 20
    set_hold(log, None)
    assert log.hold.read() is None


def test_a_forgotten_incr_does_not_end_the_log(setting: Log, ranker: Path, ranker_graph: Path) -> None:
    options = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", setting.model)
    before = sorted(map(str, setting.model.rglob("*")))
    for way in ((), ("--dry-run",), ("--watch", "--until", "0.1")):
        refused = export_model(*options, *way)
        assert refused.code == 5
        assert f"{setting.model / '10'} takes deltas" in refused.err
        assert all(option in refused.err for option in ("--incr", "--new-base always", "--despite deltas"))
    assert sorted(path for path in map(str, setting.model.rglob("*")) if "/.watch" not in path) == before
    note = f"note: {setting.model / '10'} takes deltas"
    assert note in export_model(*options, "--dry-run", "--despite=deltas").err
    assert export_model(*options, "--dry-run", "--new-base=always").code == 0
    assert export_model(*options, "--new-base=always", "--despite=deltas").code == 2
    assert note in export_model(*options, "--despite=deltas").err
    assert "note" not in export_model(*options).err, "what is replaced now takes none either"


def test_a_model_that_goes_back_is_told(tmp_path: Path) -> None:
    trainer = followed(tmp_path, (20, 30), published=30, by_saving=True)
    trainer.go_back(next(saved for saved in trainer.saved if saved.step == 20))
    log = Log(tmp_path)
    back = "the model goes back from step 30, which is published, to step 20"
    assert log.export("--dry-run").document["notes"] == [back]
    ran = export_model("--ckpt-dir", log.train, "--out", log.model, "--incr")
    assert f"note          {back}" in ran.out
    assert log.export().document["notes"] == []


@pytest.mark.parametrize(
    "options", [("--add=stamp",), ("--add=digest", "--verify", "none"), ("--isolation", "row")]
)
def test_how_deltas_are_taken_is_no_matter_of_a_plain_version(setting: Log, options: tuple[str, ...]) -> None:
    ran = export_model("--ckpt-dir", setting.train, "--out", setting.model, *options)
    assert (ran.code, "with --incr or --new-base" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("options", [("--keep", "1"), ("--despite=hold",), ("--rebase", "--to", "20")])
def test_no_option_of_merge_goes_without_effect(setting: Log, options: tuple[str, ...]) -> None:
    ran = export_model("merge", setting.model, *options)
    assert ran.code == 2
    assert "--rebase" in ran.err
