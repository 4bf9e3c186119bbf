"""Models named by the URL of an object store: every command works there, and nothing is kept locally."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array
from exporter.errors import CheckpointChanged, CheckpointError
from exporter.publish.delta_log import read_log
from exporter.storage.objects import ObjectReader, ObjectWriter, RemoteObject
from exporter.transfer.opened import opened
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import BASE, SECRET, Bucket
from tests.support.remote_models import incr, went_on
from tests.support.setting import Setting, followed


class Followed(Setting):
    """A trainer, whose base at 10 is in a store; the local model is there to compare with."""

    trainer: Trainer

    def train(self, step: int) -> None:
        self.trainer.train()
        self.trainer.step = step
        self.trainer.increment()


@pytest.fixture
def followed_there(tmp_path: Path, url: str) -> Trainer:
    """A base at 10, in the store alone."""
    setting = Setting(tmp_path / "one")
    trainer = followed(setting.directory, (), published=0)
    push(plan_push(setting.model, url))
    return trainer


def pulled(url: str, directory: Path) -> Path:
    """What servers would read."""
    pull(url, directory, prune=True)
    return directory


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory: no command leaves anything of a model there."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    yield private
    assert not [path for path in private.rglob("*") if path.is_file() and f"{BASE}/" in path.as_posix()]


def test_deltas_go_to_a_url(followed_there: Trainer, url: str, bucket: Bucket, tmp_path: Path) -> None:
    trainer = followed_there
    for step in (20, 30):
        went_on(trainer, step)
        ran = incr(trainer, url)
        assert (ran.code, ran.document["status"]) == (0, "published"), ran.err
        name = f"{step - 10:020d}-{step:020d}"
        assert ran.document["path"] == f"{url}/deltas/00000000000000000010/{name}"
    assert "private" not in ran.out + ran.err
    model = pulled(url, tmp_path / "here")
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    assert incr(trainer, url).document["status"] == "nothing_to_do"
    found = bucket.keys()
    assert not [key for key in found if ".json." in key or ".probe" in key]


def test_versions_go_to_a_url(
    ranker: Path, ranker_graph: Path, url: str, bucket: Bucket, tmp_path: Path
) -> None:
    command = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--json")
    planned = export_model(*command, "--dry-run")
    assert (planned.code, bucket.keys()) == (0, {}), planned.err
    ran = export_model(*command)
    assert (ran.code, ran.document["path"]) == (0, f"{url}/20"), ran.err
    again = export_model(*command)
    assert (again.code, again.document["status"]) == (0, "nothing_to_do"), again.err
    ran = export_model(*command, "--again", "--keep", "1")
    assert (ran.code, ran.document["version"]) == (0, 21), ran.err
    assert ran.document["bytes_linked"] == 0
    assert [kept["version"] for kept in ran.document["versions_kept"]] == [20]  # servers may be loading it
    assert export_model("verify", url, "--bytes").code == 0
    assert {path.name for path in pulled(url, tmp_path / "here").iterdir()} >= {"20", "21"}
    refused = export_model(*command, "--again", "--data", "link")
    assert (refused.code, refused.error["error"]) == (2, "UsageError")


def test_the_doctor_reads_checkpoints_and_says_from_where_it_looks(
    followed_there: Trainer, url: str, tmp_path: Path
) -> None:
    """What an agent on another machine meets, with other credentials, it cannot see."""
    ran = export_model("doctor", url, "--ckpt-dir", tmp_path / "nothing", "--json")
    assert (ran.code, [each["code"] for each in ran.document["findings"]]) == (3, ["checkpoint"])
    assert ran.document["read_by"].endswith(f"@{os.uname().nodename}")
    assert {"AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"} <= {*ran.document["variables"]}
    told = export_model("doctor", url).out
    assert ("read by " in told, "type this on its machine" in told, SECRET in told) == (
        True,
        True,
        False,
    )


def test_every_command_of_the_log(followed_there: Trainer, url: str, bucket: Bucket, tmp_path: Path) -> None:
    """What would be done is printed without a byte written; then it is done, and told by the URL."""
    trainer = followed_there
    for step in (20, 30):
        went_on(trainer, step)
        assert incr(trainer, url).code == 0
    before = bucket.keys()
    values = values_at(read_log(pulled(url, tmp_path / "before")))
    for arguments in (
        ("merge", url, "--dry-run"),
        ("merge", url, "--rebase", "--dry-run"),
        ("rollback", url, "--to", 20, "--dry-run"),
        ("history", url),
        ("verify", url, "--bytes"),
        ("doctor", url),
        ("doctor", url, "--ckpt-dir", trainer.directory),
        ("inspect", url),
        ("diff", f"{url}@20", url),
        ("diff", url, trainer.directory),
    ):
        ran = export_model(*arguments, "--json")
        assert ran.code == 0, (arguments, ran.err)
        assert "private" not in ran.out + ran.err, arguments
    assert bucket.keys() == before
    merged = export_model("merge", url, "--json")
    assert merged.document["path"] == f"{url}/deltas/{10:020d}/{10:020d}-{30:020d}"
    assert export_model("merge", url, "--json").document["status"] == "nothing_to_do"
    based = export_model("merge", url, "--rebase", "--json")
    assert (based.code, based.document["path"]) == (0, f"{url}/30"), based.err
    taken_back = export_model("rollback", url, "--to", 20, "--reason", "scores fell", "--json")
    assert (taken_back.code, taken_back.document["hold"]) == (0, 31), taken_back.err
    model = pulled(url, tmp_path / "held")
    assert read_log(model).hold.read() == 31
    assert_same_bits(values_at(read_log(model)), values_at(read_log(model), 20))
    went_on(trainer, 40)
    assert incr(trainer, url).document["hold"] == 31
    told = export_model("history", url, "--json").document
    assert (told["hold"], told["position"], told["model"]) == (31, 40, url)
    lifted = export_model("resume", url, "--json")
    assert (lifted.code, lifted.document["hold"]) == (0, None), lifted.err
    model = pulled(url, tmp_path / "held")
    assert read_log(model).hold.read() is None
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    assert_same_bits(values_at(read_log(model), 30), values)
    assert export_model("verify", url, "--bytes").code == 0


def test_what_a_store_refuses_is_no_damage_of_the_model(
    followed_there: Trainer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on(followed_there, 20)
    assert incr(followed_there, url).code == 0
    for kind, code in ((CheckpointError, 3), (CheckpointChanged, 5)):  # 5: another machine removed it

        def refused(*rest: object, kind: type[CheckpointError] = kind) -> None:
            raise kind("it is ill", hint="later")

        monkeypatch.setattr(ObjectReader, "copy", refused)
        ran = export_model("verify", url, "--json")
        assert ran.code == code, ran.err
        said = ran.error["message"], ran.error["cause"], ran.error["hint"]
        assert "it is ill" in said


def test_versions_are_taken_back(ranker: Path, ranker_graph: Path, url: str, tmp_path: Path) -> None:
    command = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--json", "--again")
    assert [export_model(*command).code for _ in range(2)] == [0, 0]
    taken_back = export_model("rollback", url, "--to", 20, "--json")
    assert (taken_back.code, taken_back.document["path"]) == (0, f"{url}/22"), taken_back.err
    assert export_model(*command).error["error"] == "ModelHeld"
    assert export_model("verify", url, "--bytes").code == 0
    assert export_model("resume", url).code == 0
    here = pulled(url, tmp_path / "here")
    for number in (21, 22, 23):
        for path in (here / "20").rglob("*"):
            if path.is_file() and path.name != "manifest.json":
                assert (here / str(number) / path.relative_to(here / "20")).read_bytes() == path.read_bytes()


def test_versions_without_deltas_are_compared(
    ranker: Path, ranker_graph: Path, url: str, tmp_path: Path
) -> None:
    """A model stands for its newest version, `MODEL@N` for version N; in a store, too."""
    model = tmp_path / "m"
    export = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", model]
    assert [export_model(*export).code, export_model(*export, "--again").code] == [0, 0]
    assert export_model("push", model, url).code == 0
    first, second = (int(path.name) for path in sorted(model.iterdir()) if path.name.isdigit())
    for a, b in ((f"{model}@{first}", url), (url, model / str(second)), (f"{url}@{first}", ranker)):
        ran = export_model("diff", a, b, "--json")
        assert (ran.code, ran.document["variables"]) == (0, []), ran.err
        assert ran.document["compared"] > 0
    assert export_model("diff", f"{model}@{second + 1}", url).code == 5


def test_a_base_is_not_fetched_for_an_increment(
    followed_there: Trainer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = followed_there
    went_on(trainer, 20)
    fetched: list[str] = []
    read = ObjectReader.read

    def noted(self: ObjectReader, each: RemoteObject, start: int, stop: int) -> memoryview:
        fetched.append(each.key)
        return read(self, each, start, stop)

    monkeypatch.setattr(ObjectReader, "read", noted)
    assert incr(trainer, url).code == 0
    assert set(fetched) == {f"{BASE}/10/manifest.json"}
    assert export_model("history", url).code == 0
    assert not [key for key in fetched if ".data-" in key]


@pytest.mark.landing
@pytest.mark.parametrize("options", [("--delta-budget", "change=0.5"), ("--delta-dtype", "bfloat16")])
def test_what_was_held_back_is_known_on_another_machine(
    followed_there: Trainer, url: str, options: tuple[object, ...], tmp_path: Path
) -> None:
    """Each command begins with nothing, as on another machine; the next one need not compare all rows."""
    trainer = followed_there
    for step in (20, 30, 40, 50):
        trainer.train(rows=10)
        for name, value in trainer.values.items():
            trainer.values[name] = np.nan_to_num(value)
            if trainer.is_table(name):
                trainer.values[name] += np.float32(0.01) * (step == 30)
                trainer.touched.setdefault(name, set()).update(range(len(value)))
        trainer.step = step
        trainer.increment()
        ran = incr(trainer, url, *options)
        assert ran.code == 0, ran.err
        assert ran.document["compares"] is False, ran.document["why"]
        served = values_at(read_log(pulled(url, tmp_path / "here")))
        for name, want in served_now(trainer, Serving()).items():
            off = np.abs(served[name] - want)
            assert np.nanmax(off, initial=0.0) <= (0.5 if options[0] == "--delta-budget" else 0.02 * 4), name
    ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    assert_same_bits(values_at(read_log(pulled(url, tmp_path / "here"))), served_now(trainer, Serving()))


def test_full_checkpoints_are_compared_by_their_hashes(
    followed_there: Trainer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, fetched = followed_there, list[str]()
    read = ObjectReader.read

    def noted(self: ObjectReader, each: RemoteObject, start: int, stop: int) -> memoryview:
        fetched.append(each.key)
        return read(self, each, start, stop)

    monkeypatch.setattr(ObjectReader, "read", noted)
    for step in (20, 30):
        fetched.clear()
        trainer.train()
        trainer.step, trainer.touched, trainer.parent = step, {}, None
        trainer.save()
        ran = incr(trainer, url)
        assert (ran.code, ran.document["compares"]) == (0, True), ran.err
    assert [key for key in fetched if key.endswith("hashes")]


def test_local_and_remote_settings_are_of_one_form(tmp_path: Path, url: str) -> None:
    for arguments, expected in (
        (("verify", url), "NotUpdatable"),
        (("merge", url), "NotUpdatable"),
        (("rollback", url, "--to", 3), "NotUpdatable"),
        (("verify", "s3://bucket-alone"), "UsageError"),
        (("--ckpt-dir", f"{url}/train", "--out", url), "UsageError"),
        (("--ckpt-dir", url, "--out", f"{url}/served", "--incr"), "UsageError"),
    ):
        ran = export_model(*arguments, "--json")
        assert (ran.error["error"], "private" in ran.err) == (expected, False), ran.err


def test_a_watch_publishes_to_a_url_beside_another_machine(
    followed_there: Trainer, url: str, tmp_path: Path
) -> None:
    trainer = followed_there
    command = [sys.executable, "-m", "exporter", "--ckpt-dir", str(trainer.directory), "--out", url, "--incr"]
    with subprocess.Popen(
        [*command, "--watch", "--interval", "0.2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            for step in (20, 30, 40):
                went_on(trainer, step)
                if step == 30:  # whoever is first publishes it; the watch goes on from there
                    assert incr(trainer, url).code == 0
                    assert export_model("rollback", url, "--to", 20).code == 0
                    assert export_model("resume", url).code == 0
                    continue
                while line := process.stdout.readline():
                    if json.loads(line)["step"] == step:
                        break
                assert line, process.stderr.read()
                model = pulled(url, tmp_path / "here")
                assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_watch_of_full_exports(ranker: Path, ranker_graph: Path, url: str, bucket: Bucket) -> None:
    command = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--watch", "--until", "idle=1s")
    ran = export_model(*command, "--json", "--interval", "0.2")
    assert (ran.code, json.loads(ran.out)["path"]) == (0, f"{url}/20"), ran.err
    before = bucket.keys()
    assert export_model(*command, "--interval", "0.2").code == 0
    assert bucket.keys() == before


def test_few_requests(followed_there: Trainer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing costs as much as a thousand objects: one for a command, one more for what it published."""
    asked: list[str] = []
    for kind, name in ((ObjectReader, "below"), (ObjectReader, "beside"), (ObjectWriter, "fetch")):
        method = getattr(kind, name)

        def counted(self: Any, *rest: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            asked.append(_name)
            return _method(self, *rest, **named)

        monkeypatch.setattr(kind, name, counted)
    went_on(followed_there, 20)
    assert incr(followed_there, url).code == 0
    assert asked.count("below") == 1 and "beside" not in asked
    asked.clear()
    assert export_model("verify", url).code == 0
    assert (asked.count("below"), asked.count("fetch")) == (1, 2)
    with opened(url) as model:
        asked.clear()
        for _ in range(5):
            model.carry(lambda: None)
        assert asked == ["fetch"] * 5


def test_the_guides_commands(bucket: Bucket, ranker: Path, tmp_path: Path) -> None:
    """From a trainer's bucket to a model's, and what may be done there."""
    training, url = bucket.url("training/ranker"), bucket.url(BASE)
    model = Path(__file__).parents[2] / "examples/ranker/model.py"
    export = ("--ckpt-dir", training, "--model", f"{model}:serving", "--out", url, "--incr", "--json")
    bucket.upload(ranker, "training/ranker")
    ran = export_model(*export)
    assert (ran.code, ran.document["path"]) == (0, f"{url}/20"), ran.err
    for number in (21, 22):  # a trainer that goes on
        _trained_on(ranker, tmp_path / "train", number)
        bucket.upload(tmp_path / "train", "training/ranker")
        ran = export_model(*export)
        assert (ran.code, ran.document["position"]) == (0, number), ran.err
    for command in (
        ("history", url),
        ("diff", f"{url}@20", url),
        ("merge", url),
        ("rollback", url, "--to", 20, "--reason", "scores fell"),
        ("resume", url),
        ("verify", url, "--bytes"),
        ("doctor", url),
    ):
        ran = export_model(*command, "--json")
        assert ran.code == 0, (command, ran.err)
        assert "private" not in ran.out + ran.err
    assert pull(url, tmp_path / "here").position == 24


def _trained_on(ranker: Path, directory: Path, step: int) -> None:
    """A full checkpoint of the ranker, in which a row of each table has moved."""
    catalog = open_checkpoint(ranker)
    directory.mkdir(exist_ok=True)
    with BundleWriter(directory / f"model.ckpt-{step}") as writer:
        for name, tensor in catalog.tensors.items():
            value = read_array(catalog, tensor)
            if value.dtype == np.float32 and value.ndim == 2:
                value = value.copy()
                value[step % len(value)] += 1
            writer.add(name, np.array(step, np.int64) if name == "global_step" else value)
    meta = next(ranker.glob("*.meta"))
    shutil.copyfile(meta, directory / f"model.ckpt-{step}.meta")
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


def test_googles_store(gs_bucket: Bucket, tmp_path: Path) -> None:
    """Its conditions name generations, and not what an object holds."""
    setting, url = Setting(tmp_path / "one"), gs_bucket.url(BASE)
    trainer = followed(setting.directory, (), published=0)
    push(plan_push(setting.model, url))
    for step in (20, 30):
        went_on(trainer, step)
        ran = incr(trainer, url, "--delta-budget", "change=0.01")
        assert (ran.code, ran.document["position"]) == (0, step), ran.err
    for command in (
        ("merge", url),
        ("rollback", url, "--to", 20),
        ("resume", url),
        ("verify", url, "--bytes"),
    ):
        ran = export_model(*command, "--json")
        assert ran.code == 0, (command, ran.err)
    went_on(trainer, 40)
    assert incr(trainer, url).code == 0
    log = read_log(pulled(url, tmp_path / "here"))
    assert_same_bits(values_at(log), served_now(trainer, Serving()))
