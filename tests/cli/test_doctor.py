"""`doctor` finds what really is wrong, says which command helps, and that command helps."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.pipeline.doctor import Check, check_of, diagnosis, examine
from exporter.publish.delta_log import log_path
from exporter.publish.judge import Code, Finding, Level
from exporter.publish.staging import Staging
from exporter.storage.layout import STAGING_PREFIX
from exporter.verify.log import delta_damage
from tests.support.commands import Ran, export_model
from tests.support.setting import Setting, followed
from tests.support.users import as_user, needs_root

ROOT = Path(__file__).parents[2]


class Place(Setting):
    """Published: a base at 10, deltas to 20 and 30; every directory above is open to all users."""

    def doctor(self, *options: object) -> Ran:
        return export_model("doctor", self.model, "--json", *options)

    def findings(self, *options: object) -> list[tuple[str, str]]:
        return [(found["check"], found["level"]) for found in self.doctor(*options).document["findings"]]


@pytest.fixture(scope="module")
def origin() -> Iterator[Path]:
    """Not under pytest's own directory, which keeps other users out."""
    with tempfile.TemporaryDirectory(dir=Path("/tmp")) as name:
        directory = Path(name)
        directory.chmod(0o755)
        followed(directory, (20, 30), published=30)
        yield directory


@pytest.fixture
def place(origin: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=origin.parent) as name:
        directory = Path(name)
        directory.chmod(0o755)
        for part in ("model", "train"):
            shutil.copytree(origin / part, directory / part)
        yield Place(directory)


def contents(directory: Path) -> list[tuple[str, float]]:
    return sorted((str(path), path.lstat().st_mtime) for path in directory.rglob("*") if path.is_file())


def run_shell(line: str) -> None:
    """The command of a finding, as a person would paste it."""
    words = shlex.split(line)
    if words[0] == "export-model":
        assert export_model(*words[1:]).code == 0
    else:
        subprocess.run(words, check=True)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def test_nothing_is_wrong_and_nothing_is_changed(place: Place) -> None:
    before = contents(place.directory)
    ran = place.doctor("--ckpt-dir", place.train)
    assert (ran.code, ran.document["status"], ran.document["findings"]) == (0, "well", [])
    assert next(iter(ran.document)) == "format_version"
    assert (ran.document["position"], ran.document["deltas"], ran.document["hold"]) == (30, 2, None)
    assert contents(place.directory) == before
    assert "nothing wrong" in export_model("doctor", place.model).out
    assert export_model("doctor", place.model, "-q") == Ran(0, "", "")


def hold(place: Place) -> None:
    (place.log / "hold").write_text("20\n")


def broken_hold(place: Place) -> None:
    (place.log / "hold").write_text("twenty")


def killed_rollback(place: Place) -> None:
    (place.log / "hold").symlink_to(Path("00000000000000000010-00000000000000000031", "hold"))


def spare_delta(place: Place) -> None:
    assert export_model("merge", place.model, "-q").code == 0
    parts = [path for path in place.deltas if path.name.endswith("20")]
    damage(parts[0] / "delta.data-00000-of-00001")


def orphan(place: Place) -> None:
    shutil.copytree(place.deltas[0], log_path(place.model, 3) / f"{3:020d}-{5:020d}")


def empty_version(place: Place) -> None:
    (place.model / "99").mkdir()


def file_as_version(place: Place) -> None:
    (place.model / " 99 ").write_text("a note")


def foreign_version(place: Place) -> None:
    shutil.copytree(place.model / "10", place.model / "99")
    (place.model / "99" / "manifest.json").unlink()


def killed_exporter(place: Place) -> None:
    code = (
        "import sys, time; from pathlib import Path; from exporter.publish.staging import Staging\n"
        "with Staging(Path(sys.argv[1])): print('staged', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, place.model], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(place.model.glob(f"{STAGING_PREFIX}*"))


def trash(place: Place) -> None:
    (place.model / "10").rename(place.model / ".trash-10-00000000")
    shutil.copytree(place.model / ".trash-10-00000000", place.model / "10")


def closed_file(place: Place) -> None:
    (place.model / "10" / "saved_model.pb").chmod(0o600)


def closed_delta(place: Place) -> None:
    place.deltas[1].chmod(0o700)


def closed_model(place: Place) -> None:
    place.model.chmod(0o700)


def closed_above(place: Place) -> None:
    place.directory.chmod(0o700)


@pytest.mark.parametrize(
    ("break_", "check", "level"),
    [
        (hold, Check.HOLD, Level.WARNING),
        (broken_hold, Check.HOLD, Level.WRONG),
        (killed_rollback, Check.HOLD, Level.WRONG),
        (spare_delta, Check.FILES, Level.WRONG),
        (orphan, Check.ORPHANS, Level.WARNING),
        (empty_version, Check.STRANGERS, Level.WRONG),
        (file_as_version, Check.STRANGERS, Level.WRONG),
        (foreign_version, Check.STRANGERS, Level.WARNING),
        (killed_exporter, Check.LEFT_OVERS, Level.WARNING),
        (trash, Check.LEFT_OVERS, Level.WARNING),
        (closed_file, Check.PERMISSIONS, Level.WRONG),
        (closed_delta, Check.PERMISSIONS, Level.WRONG),
        (closed_model, Check.PERMISSIONS, Level.WARNING),
        (closed_above, Check.PERMISSIONS, Level.WARNING),
    ],
)
def test_the_command_of_a_finding_mends_it(
    place: Place, break_: Callable[[Place], None], check: Check, level: Level
) -> None:
    break_(place)
    ran = place.doctor()
    found = ran.document["findings"]
    assert [(one["check"], one["level"]) for one in found] == [(check, level)]
    assert ran.code == (6 if level is Level.WRONG else 0)
    assert ran.document["status"] == ("wrong" if level is Level.WRONG else "warnings")
    if ran.code:
        assert ran.error["message"].startswith("1 thing is wrong")
        assert ran.error["hint"] == found[0]["command"]
    run_shell(found[0]["command"])
    assert place.findings() == []


def test_a_delta_that_servers_need_asks_for_a_new_base(place: Place) -> None:
    damage(place.deltas[0] / "delta.data-00000-of-00001")
    (found,) = place.doctor("--ckpt-dir", place.train).document["findings"]
    assert (found["check"], found["level"]) == ("files", "wrong")
    expected = (
        f"export-model --ckpt-dir {place.train} --model WHAT --out {place.model} --new-base always --again"
    )
    assert found["command"] == expected


def test_a_base_without_a_way_to_the_newest_position(place: Place) -> None:
    shutil.rmtree(place.deltas[0])
    (found,) = place.doctor().document["findings"]
    assert (found["check"], found["level"]) == ("ways", "wrong")
    assert str(place.model / "10") in found["message"]
    assert found["command"].endswith("--new-base always --again")


@pytest.mark.parametrize("name", ["manifest.json", "variables/variables.index"])
def test_a_damaged_version(place: Place, name: str) -> None:
    damage(place.model / "10" / name)
    assert ("files", "wrong") in place.findings()


def test_what_is_being_published_is_no_left_over(place: Place) -> None:
    with Staging(place.model):
        assert place.findings() == []


def test_clocks_that_differ(place: Place) -> None:
    seen = examine(place.model, None, now=time.time() - 7200)
    assert [check_of(found) for found in seen.findings] == [Check.CLOCK, Check.CLOCK]
    published, files = seen.findings
    assert "as 2 more" in published.text
    assert "7200 s ahead of" in files.text


def test_checkpoints_on_another_file_system(place: Place) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == place.model.stat().st_dev:
        pytest.skip("this machine has one file system")
    with tempfile.TemporaryDirectory(dir=other) as name:
        elsewhere = Path(name) / "train"
        shutil.copytree(place.train, elsewhere)
        ran = place.doctor("--ckpt-dir", elsewhere)
    (found,) = ran.document["findings"]
    assert (ran.code, found["check"], found["level"]) == (0, "links", "warning")
    assert "EXDEV" in found["cause"]


def test_shards_that_servers_could_not_read(place: Place) -> None:
    shard = next(place.train.glob("*.data-*"))
    shard.chmod(0o600)
    (found,) = place.doctor("--ckpt-dir", place.train).document["findings"]
    assert (found["check"], found["level"]) == ("links", "warning")
    assert "0600" in found["cause"]
    run_shell(found["command"])
    assert place.findings("--ckpt-dir", place.train) == []


def test_a_checkpoint_that_cannot_be_exported(place: Place) -> None:
    ran = place.doctor("--ckpt-dir", place.directory / "trian")
    assert (ran.code, ran.error["error"]) == (3, "CheckpointError")
    assert ran.document["findings"][0]["check"] == "checkpoint"
    next(place.train.glob("*.data-*")).unlink()
    assert place.doctor("--ckpt-dir", place.train).code == 3


def test_of_several_the_disk_counts_first() -> None:
    def wrong(check: Check) -> Finding:
        return Finding(Code.UNEXAMINED, "m", command="c", check=check.value)

    def code(*checks: Check) -> int:
        error = diagnosis(Path("model"), map(wrong, checks))
        assert error is not None
        return int(error.exit_code)

    assert code(Check.REPLICAS) == 7
    assert code(Check.REPLICAS, Check.CHECKPOINT) == 3
    assert code(Check.REPLICAS, Check.CHECKPOINT, Check.WAYS) == 6
    assert diagnosis(Path("model"), [Finding(Code.HELD, "m", command="c")]) is None


def test_nothing_published_is_a_position_error(tmp_path: Path) -> None:
    ran = export_model("doctor", tmp_path, "--json")
    assert (ran.code, ran.error["error"]) == (5, "NotUpdatable")


@needs_root
def test_another_user_cannot_publish_and_reads_what_doctor_says(place: Place) -> None:
    assert place.findings() == []

    def look() -> object:
        return [
            (check_of(found), found.text) for found in examine(place.model, None, now=time.time()).findings
        ]

    (found,) = as_user(65534, look)  # type: ignore[misc]  a list, as `look` makes it
    assert found[0] == "permissions"
    assert "uid 65534) cannot publish" in found[1]
    assert "belongs to uid 0" in found[1]
    closed_file(place)
    file = place.model / "10" / "saved_model.pb"
    assert as_user(65534, lambda: os.access(file, os.R_OK)) is False
    assert place.findings() == [("permissions", "wrong")]


@needs_root
@pytest.mark.parametrize("name", ["manifest.json", "delta.index", "delta.data-00000-of-00001", ""])
def test_a_file_that_may_not_be_read_is_neither_damaged_nor_to_be_removed(place: Place, name: str) -> None:
    assert export_model("merge", place.model, "-q").code == 0  # the single deltas are spare
    delta = place.deltas[0]
    (delta / name).chmod(0)

    def look() -> object:
        found = examine(place.model, None, now=time.time()).findings
        return delta_damage(delta), [[each.code, each.check, each.command] for each in found]

    damaged, found = as_user(65534, look)  # type: ignore[misc]  a pair, as `look` makes it
    assert damaged == ""
    assert (Code.UNEXAMINED, Check.FILES) in [(code, check) for code, check, _ in found]
    assert not [each for each in found if each[0] == Code.DAMAGED or each[2].startswith("rm ")]


def test_doctor_does_not_import_tensorflow(place: Place) -> None:
    code = (
        "import sys\nfrom exporter.cli.app import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\nexcept BaseException: pass\n"
        "assert 'grpc' in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    arguments = ["doctor", str(place.model), "--ckpt-dir", str(place.train), "--target", "127.0.0.1:9"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=ROOT, timeout=300)
