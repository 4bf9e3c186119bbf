"""Back over a change of structure: values of logs that have ended, and of plain versions beside logs."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import exporter
from exporter.errors import ModelHeld, PositionUnknown, VerificationError
from exporter.options import ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import log_path, read_log
from exporter.publish.hold import Hold
from exporter.publish.manifest import to_json
from exporter.publish.model import Model
from exporter.publish.retention import Keep, retire
from exporter.publish.signing import Signer, with_digests
from exporter.publish.staging import Staging
from exporter.publish.tags import resolve_position, version_named
from exporter.publish.versions import read_manifest, version_dirs
from exporter.transfer.pull import pull
from exporter.verify.log import verify_model
from tests.support.commands import export_model
from tests.support.key_pairs import key_pair
from tests.support.kills import count_steps, killed_at, points
from tests.support.logs import Serving, Trainer, assert_same_bits, publish_base, request, values_at
from tests.support.mapped_models import ROWS, MappedModel, mapped_below
from tests.support.publishing import hidden
from tests.support.setting import followed
from tests.support.step_models import published, request_of, save, versions
from tests.support.updatable import loaded, loaded_quickly

OTHER = Updates(stamp=True)
"""What the base of the newer structure says of updates, and the older one does not."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base at 10 and deltas to 20 and 30; then a base of another structure at 40 and a delta to 50."""
    directory = tmp_path_factory.mktemp("origin")
    trainer = followed(directory, (20, 30), published=30)
    model = directory / "model"
    trainer.train()
    trainer.step = 40
    trainer.save()
    publish_base(trainer, Serving(dense=frozenset({"items"})), model)
    trainer.train()
    trainer.step = 50
    trainer.save()
    export_incremental(request(trainer, model))
    return directory


@pytest.fixture
def model(origin: Path, tmp_path: Path) -> Path:
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model"


def schema(model: Path) -> str:
    return read_log(model).schema.digest


def values(model: Path, position: int) -> dict[str, np.ndarray]:
    """The values at a position of any log, by a copy of the model in which that log is the newest."""
    older = [child for child in version_dirs(model) if child.version <= position]
    copy = model.with_name(f"as-of-{position}")
    for child in older:
        shutil.copytree(child.path, copy / child.path.name)
    shutil.copytree(model / "deltas", copy / "deltas")
    return values_at(read_log(copy), position)


@pytest.mark.parametrize("to", [10, 20, 30])
def test_a_position_of_a_log_that_has_ended_comes_back_as_a_base_and_resume_leads_on(
    model: Path, to: int
) -> None:
    newer, expected, now = schema(model), values(model, to), values_at(read_log(model))
    planned = export_model("rollback", model, "--to", to, "--dry-run", "--json").document
    assert (planned["position"], planned["made"], versions(model)) == (51, "base", [40, 10])
    ran = export_model("rollback", model, "--to", to, "--reason", "scores fell")
    assert ran.code == 0
    assert "a new base" in ran.out
    log = read_log(model)
    assert (log.number, log.at.position, log.hold.read(), log.at.step) == (51, 51, 51, to)
    assert log.lineage not in {read_manifest(model / number).lineage for number in ("10", "40")}
    assert_same_bits(values_at(log), expected)
    told = export_model("history", model, "--json").document
    (event,) = (each for each in told["events"] if each["position"] == 51)
    assert (event["what"], event["back_to"], event["reason"]) == ("rollback", to, "scores fell")
    assert (told["hold"], event["is_past_hold"]) == (51, False)
    seen = Model.read(model).newest_log
    assert seen is not None
    assert seen.rollback is not None
    assert (seen.rollback.back_to, seen.waiting) == (to, 0)
    assert verify_model(model, bytes_=True).problems == ()
    back = export_model("resume", model, "--json").document
    assert (back["values_of"], back["position"], back["hold"], back["made"]) == (50, 52, None, "base")
    assert_same_bits(values_at(read_log(model)), now)
    assert (schema(model), read_log(model).hold.is_set) == (newer, False)
    assert export_model("resume", model, "--json").document["status"] == "nothing_to_do"
    trainer = Trainer(model.parent / "train")
    trainer.step = 60
    trainer.save()
    export_incremental(request(trainer, model))
    assert read_log(model).at.position == 60


def test_where_no_delta_is_merged_the_data_is_linked(model: Path) -> None:
    assert export_model("rollback", model, "--to", 10).code == 0
    shard = "variables/variables.data-00000-of-00001"
    assert (model / "51" / shard).samefile(model / "10" / shard)


def test_after_several_rollbacks_over_the_border_the_first_one_counts(model: Path) -> None:
    for to in (20, 50, 30, 10):
        assert export_model("rollback", model, "--to", to).code == 0
    done = exporter.resume(model)
    assert (done.values_of.position, str(done.made)) == (50, "base")


def test_a_rollback_inside_the_base_that_was_brought_back_resumes_over_the_border(model: Path) -> None:
    exporter.rollback(model, 20)
    trainer = Trainer(model.parent / "train", step=60)
    trainer.save()
    export_incremental(request(trainer, model))  # a trainer that was set back to the older structure
    assert read_log(model).hold.read() == 51
    assert exporter.rollback(model, 51).position == 61
    assert exporter.resume(model).values_of.position == 60
    exporter.rollback(model, 51)
    exporter.rollback(model, 50)
    assert exporter.resume(model).values_of.position == 62


def test_names_of_positions_reach_over_the_border(model: Path) -> None:
    assert resolve_position("@latest", model) == 50
    shutil.rmtree(next((model / "deltas").glob("*40/*50")))
    assert [resolve_position(name, model) for name in ("@latest", "@previous")] == [40, 30]
    found = export_model("diff", f"{model}@10", f"{model}@20", "--json").document
    assert (found["a"]["position"], found["b"]["position"]) == (10, 20)
    assert export_model("diff", f"{model}@20", f"{model}@20", "--exit-code").code == 0
    assert export_model("diff", f"{model}@20", model, "--exit-code").code == 10


def test_a_tag_names_any_published_version_and_keeps_it(model: Path) -> None:
    for name, position in (("good", 10), ("better", 20), ("newest", 50)):
        assert export_model("tag", model, name, position).code == 0
    assert [version_named(name, model) for name in ("good", "better", "newest")] == [10, 10, 40]
    (better, good, newest) = export_model("tag", model, "--json").document["tags"]
    assert (good["gone"], good["keeps"], better["gone"], newest["keeps"]) == ("", 10, "", None)
    kept = retire(version_dirs(model), keep=Keep(1), now=1e12, grace_seconds=0)
    assert (kept.removed, [each.version for each in kept.kept]) == ((), [10])
    assert export_model("history", model, "--json").document["events"][0]["tags"] == ["good"]
    done = exporter.rollback(model, "better")
    assert (done.values_of.position, done.position) == (20, 51)


def test_a_position_whose_base_is_gone_is_named(model: Path) -> None:
    exporter.tag(model, "good", 20)
    shutil.rmtree(model / "10")
    with pytest.raises(PositionUnknown, match="position 20") as caught:
        exporter.rollback(model, 20)
    assert "its log has ended, and no base of that is left" in str(caught.value.cause)
    assert "good 20 (gone)" in export_model("history", model).out
    assert not read_log(model).hold.is_set
    with pytest.raises(PositionUnknown, match="position 25"):
        exporter.rollback(model, 25)


def test_the_functions_of_python_say_the_same(model: Path) -> None:
    assert str(exporter.rollback(model, 20, dry_run=True).made) == "base"
    tagged = exporter.tag(model, "good", 20, dry_run=True).tag
    assert tagged is not None
    assert tagged.position == 20
    with pytest.raises(PositionUnknown, match="position 20 is of a log that has ended"):
        exporter.merge(model, 20, 50)
    assert exporter.rebase(model, dry_run=True) is not None
    assert not exporter.diff(f"{model}@10", f"{model}@20").is_empty


def test_resume_where_the_newer_structure_is_gone_says_how_to_go_on(model: Path) -> None:
    exporter.rollback(model, 20)
    shutil.rmtree(model / "40")
    with pytest.raises(PositionUnknown) as caught:
        exporter.resume(model)
    assert "--lift-only" in caught.value.hint
    assert read_log(model).hold.read() == 51
    exporter.resume(model, lift_only=True)
    assert not read_log(model).hold.is_set


def test_damage_does_not_come_back(model: Path) -> None:
    file = model / "10" / "saved_model.pb"
    file.write_bytes(b"\0" + file.read_bytes()[1:])
    with pytest.raises(VerificationError):
        exporter.rollback(model, 20)
    assert versions(model) == [40, 10]
    assert not read_log(model).hold.is_set
    assert not Hold(log_path(model, 51)).is_set


def roll_back(model: Path) -> None:
    log_maintenance.rollback(model, 20)


def resume(model: Path) -> None:
    log_maintenance.resume(model)


@pytest.mark.landing
@pytest.mark.parametrize("action", [roll_back, resume])
def test_a_kill_at_any_step_leaves_it_held_and_the_same_command_ends_it(model: Path, action: object) -> None:
    assert callable(action)
    saved = model.with_name("saved")
    if action is resume:
        roll_back(model)
    before = versions(model)[0]
    shutil.copytree(model, saved)
    outcomes: dict[int, bool] = {}
    for point in points(count_steps(action, model), 1 if action is roll_back else 3, outcomes):
        shutil.rmtree(model)
        shutil.copytree(saved, model)
        code = killed_at(point, action, model)
        outcomes[point] = is_done = versions(model)[0] > before
        assert code == -signal.SIGKILL or is_done  # what was just written is looked at more often
        if is_done and action is roll_back:
            assert read_log(model).hold.read() == 51
        if not is_done and action is resume:
            assert read_log(model).hold.read() == 51
        action(model)
        assert verify_model(model, bytes_=True).problems == ()
        log = read_log(model)
        assert (log.at.step, log.hold.is_set) == ((20, True) if action is roll_back else (50, False))
        assert hidden(model) == []
        if action is roll_back:
            assert exporter.resume(model).values_of.position == 50
    assert {*outcomes.values()} == {True, False}


def test_a_resumption_that_was_killed_before_its_last_step_is_said_to_be_ended(model: Path) -> None:
    number = read_log(model).number
    roll_back(model)
    ended = Hold(log_path(model, number))
    files = {path: path.read_bytes() for path in ended.directory.glob("hold*")}
    assert ended.read() == 50
    resume(model)
    assert not ended.is_set
    for path, content in files.items():
        path.write_bytes(content)
    planned = export_model("resume", model, "--dry-run", "--json").document
    assert (planned["status"], planned["path"], ended.is_set) == ("planned", None, True)
    done = export_model("resume", model, "--json").document
    assert (done["status"], done["path"], done["hold"], ended.is_set) == ("hold_lifted", None, None, False)
    assert export_model("resume", model, "--json").document["status"] == "nothing_to_do"


def test_a_hold_without_a_log_does_not_hold_the_base_that_comes(model: Path) -> None:
    """It is of a rollback that was killed right before its base."""
    left = Hold(log_path(model, 51))
    left.directory.mkdir()
    left.path.write_text("51\n")
    exporter.resume(model)
    assert not left.is_set


def test_a_hold_that_a_copy_sets_before_a_base_stays(model: Path) -> None:
    """The canary judges a new log from its first base on: so it is held before servers see that."""
    coming = Hold(log_path(model, 51))
    with Staging(model) as staging:
        coming.put(51, staging, canary=True)
    exporter.rollback(model, 40)
    assert coming.approved() == 51


def test_in_a_store(model: Path, url: str, tmp_path: Path) -> None:
    expected, now = values(model, 20), values_at(read_log(model))
    copy = tmp_path / "copy"
    assert export_model("push", model, url).code == 0
    pull(url, copy)
    planned = export_model("rollback", url, "--to", 20, "--dry-run", "--json").document
    assert (planned["path"], planned["made"]) == (f"{url}/51", "base")
    assert export_model("rollback", url, "--to", 20).code == 0
    pull(url, copy)
    assert_same_bits(values_at(read_log(copy)), expected)
    assert (read_log(copy).at.position, read_log(copy).hold.read()) == (51, 51)
    assert export_model("resume", url, "--json").document["values_of"] == 50
    pull(url, copy)
    assert_same_bits(values_at(read_log(copy)), now)
    assert not read_log(copy).hold.is_set
    assert export_model("verify", url, "--bytes").code == 0


def test_signed(model: Path, url: str, tmp_path: Path) -> None:
    """Servers get what a key has signed: what comes back is signed, too, of what was."""
    private, public = key_pair(tmp_path)
    for path in [*model.glob("*/manifest.json"), *model.glob("deltas/*/*/manifest.json")]:
        place, files = path.parent.relative_to(model).as_posix(), path.parent
        manifest = read_manifest(files)
        signed = Signer.of(str(private), "ranker").signed(
            replace(manifest, files=with_digests(files, manifest.files)), place
        )
        path.write_text(to_json(signed))
    copy, key = tmp_path / "copy", ("--sign-key", private)
    assert export_model("push", model, url, "--trust", public, "--signed-as", "ranker").code == 0
    assert export_model("rollback", url, "--to", 20, *key).code == 0
    assert export_model("pull", url, copy, "--trust", public, "--signed-as", "ranker").code == 0
    assert (read_log(copy).at.position, read_log(copy).hold.read()) == (51, 51)
    assert export_model("resume", url).code == 2
    assert export_model("resume", url, *key).code == 0
    assert export_model("pull", url, copy, "--trust", public, "--signed-as", "ranker").code == 0
    assert read_log(copy).at.position == 52


@pytest.fixture
def request_(tmp_path: Path) -> ExportRequest:
    """With graphs: a base at 10, deltas to 20 and 30; a base of another structure at 31."""
    asked = published(tmp_path, 10, 20, 30)
    export(replace(asked, updates=OTHER))
    return asked


def test_the_trainer_waits_while_the_older_structure_is_held_and_goes_on_after_it(
    request_: ExportRequest,
) -> None:
    model, newer = request_.out, replace(request_, updates=OTHER)
    exporter.rollback(model, 20)
    save(request_.ckpt_dir, 40)
    for mismatch in (False, True):
        with pytest.raises(ModelHeld, match="held at 32") as caught:
            export_incremental(newer, full_on_mismatch=mismatch)
        assert "export-model resume" in caught.value.hint
    assert versions(model) == [32, 31, 10]
    assert exporter.resume(model).position == 33
    assert export_incremental(newer).published is not None
    assert read_log(model).at.position == 40
    with loaded_quickly(model / "33") as server:
        assert server.update()["position"] == 40
        assert server.predict(ids=[1])["rows"].tolist() == [[40, 40]]


def test_servers_take_what_was_brought_back_and_its_deltas(request_: ExportRequest) -> None:
    model = request_.out
    exporter.rollback(model, 20)
    log = read_log(model)
    with loaded(model / "32") as server:
        assert server.predict(ids=[1])["rows"].tolist() == [[20, 20]]
        status = server.call("incremental_status", probe=[0])
        assert (status["lineage"].tolist(), status["position"].tolist()) == ([log.lineage.encode()], [32])
        save(request_.ckpt_dir, 40)
        export_incremental(request_)
        assert server.update()["position"] == 32
        exporter.resume(model)
        assert server.update()["position"] == 40
        assert server.predict(ids=[1])["rows"].tolist() == [[40, 40]]
    with loaded_quickly(model / "10") as old:
        assert old.update()["position"] == 30


@pytest.mark.landing
def test_plain_versions_and_logs_in_one_model(tmp_path: Path) -> None:
    asked = published(tmp_path, 10, 20, plain=True)
    model = asked.out
    save(asked.ckpt_dir, 30)
    export(replace(asked, updates=Updates()))
    exporter.tag(model, "plain", 10)
    assert str(exporter.rollback(model, "plain").made) == "version"
    assert (read_manifest(model / "31").incremental, Hold(model).read()) == (None, 31)
    save(asked.ckpt_dir, 40)
    with pytest.raises(ModelHeld, match="held at 31"):
        export_incremental(asked)
    assert str(exporter.resume(model).made) == "base"
    assert (read_log(model).at.position, read_log(model).at.step) == (32, 30)
    assert not Hold(model).is_set
    assert export_incremental(asked).published is not None
    shutil.rmtree(asked.ckpt_dir)
    save(asked.ckpt_dir, 50)
    export(replace(asked, plain=True))
    done = exporter.rollback(model, 40)
    assert (str(done.made), read_log(model).hold.read(), Hold(model).is_set) == ("base", done.position, False)
    assert str(exporter.resume(model).made) == "version"
    assert read_manifest(model / str(versions(model)[0])).step == 50
    assert not Hold(model).is_set


@pytest.mark.landing
@pytest.mark.parametrize("to", [7, 8])
def test_mapped_tables_come_back_mapped(tmp_path: Path, to: int) -> None:
    model = MappedModel(tmp_path)
    export(model.request(updates=Updates()))
    tables = {7: model.table.copy()}
    model.table[[3, 7, 50]] += 1
    model.save(8, model.table)
    export_incremental(model.request())
    tables[8] = model.table
    export(model.request(updates=OTHER, again=True))
    exporter.rollback(model.out, to)
    version = read_log(model.out).base.path
    assert verify_model(model.out, bytes_=True).problems == ()
    with loaded(version) as server:
        assert len(mapped_below(version)) == 1
        np.testing.assert_array_equal(server.predict(ids=np.arange(ROWS))["rows"], tables[to])
    assert request_of(tmp_path).out == model.out
