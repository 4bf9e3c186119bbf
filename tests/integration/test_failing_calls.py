"""One call on files fails, as on a network disk: a failure published nothing, what is published is success.

After every such command the same one, undisturbed, comes to the end that it would have come to, and whatever
is published is whole. Each test tries some calls, a campaign (`make thorough`) each of them with each error.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from exporter.errors import ExportError
from exporter.publish.delta_log import read_log
from exporter.publish.staging import remove_leftovers
from exporter.verify.log import verify_model
from tests.integration.chaos_world import newest_of
from tests.support.budget import THOROUGH
from tests.support.commands import Ran, export_model
from tests.support.failing_calls import ERRORS, Commands, Failure, failing_commands
from tests.support.logs import Serving, assert_same_bits, values_at
from tests.support.setting import Setting, followed

COMMANDS = {
    "delta": (("--ckpt-dir", "train", "--out", "model", "--incr"), ()),
    "delta and base": (("--ckpt-dir", "train", "--out", "model", "--incr", "--new-base=merged"), ()),
    "merge": (("merge", "model"), ()),
    "base": (("merge", "model", "--rebase"), ()),
    "rollback": (("rollback", "model", "--to", "20"), ()),
    "resume": (("resume", "model"), ("rollback", "model", "--to", "20")),
}
SELDOM, LAST = 60, 12
"""Of so many calls one fails, with one error after the other; and each of the last ones, after the commit."""


@pytest.fixture(scope="module")
def commands() -> Commands:
    return failing_commands()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory where waiting for the disk costs nothing."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def origin(memory: Path) -> Path:
    """A log of base 10 and deltas to 20 and 30; the trainer is at 40."""
    directory = memory / "origin"
    followed(directory, (20, 30, 40), published=30, serving=Serving(parts=2), by_saving=True)
    return directory


def words_in(directory: Path, words: tuple[str, ...]) -> list[object]:
    return [directory / word if word in ("train", "model") else word for word in words]


def check(directory: Path, failure: Failure, before: object, ran: Ran, words: list[object]) -> None:
    """What readers see now is what the command said, and it can be run again."""
    setting, context = Setting(directory), f"{failure}: {ran.code} {ran.out} {ran.err}"
    assert ran.code in {0, 1, 2, 3, 5, 6}, context
    assert "Traceback" not in ran.err, context
    assert "unexpected" not in ran.err, context
    is_seen = newest_of(setting.model) != before
    if ran.code:
        assert is_half_said(ran) or not is_seen, f"was published, though it failed: {context}"
    # A disk that fails for good between a rollback's promise and its commit leaves the promise: an unreadable
    # hold, by which no server moves. Running the command again heals it.
    problems = verify_model(setting.model).problems
    assert not problems or (failure.lasts and is_promised(setting.model, problems)), context
    again = export_model(*words)
    assert again.code in {0, 2}, f"{context}, then {again.err}"  # 2: it is rolled back already
    assert verify_model(setting.model).problems == (), context
    remove_leftovers(setting.model)
    assert not list(setting.model.glob(".staging-*")), context


def is_promised(model: Path, problems: Sequence[object]) -> bool:
    """The one problem is a hold that leads into a delta which did not appear."""
    (hold,) = (log / "hold" for log in model.glob("deltas/*"))  # glob passes over what leads nowhere
    (problem,) = problems
    return hold.is_symlink() and not hold.exists() and str(hold) in str(problem)


def is_half_said(ran: Ran) -> bool:
    """True if a failure says that something is published, and what is not."""
    return "is published, but" in ran.err


def is_tried(number: int, which: int, calls: int) -> bool:
    place = number * len(ERRORS) + which
    return place % (SELDOM * len(ERRORS) + 1) == 0 or (number > calls - LAST and place % 5 == 0)


@pytest.mark.landing
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_a_failure_published_nothing_and_what_is_published_is_success(
    commands: Commands, memory: Path, origin: Path, name: str, lasts: bool
) -> None:
    words, first = COMMANDS[name]
    place = memory / f"{name}-{lasts}"
    began = place / "began"
    shutil.copytree(origin, began)
    if first:
        assert export_model(*words_in(began, first)).code == 0
    before = newest_of(began / "model")
    shutil.copytree(began, place / "whole")
    _, calls = commands.run(place, Failure(), *words_in(place / "whole", words))
    expected = newest_of(place / "whole/model")
    assert expected != before
    values = values_at(read_log(place / "whole/model"))
    wrong = []
    for number in range(1, calls + 1):
        for which, error in enumerate(ERRORS):
            if not (THOROUGH or is_tried(number, which, calls)):
                continue
            here, failure = place / "here", Failure(number, error, lasts)
            shutil.copytree(began, here)
            ran, _ = commands.run(place, failure, *words_in(here, words))
            try:
                check(here, failure, before, ran, words_in(here, words))
                found = values_at(read_log(here / "model"))
                assert_same_bits(found, values)
            except (AssertionError, ExportError) as error:
                wrong.append(str(error)[:1500])
            shutil.rmtree(here)
    assert not wrong, f"{len(wrong)} of {calls}: " + "\n--- ".join(wrong)


@pytest.mark.landing
@pytest.mark.parametrize(("name", "every"), [("merge --dry-run", 5), ("verify", 5), ("merge --rebase", 1)])
def test_a_failure_of_reading_names_the_file(
    commands: Commands, memory: Path, origin: Path, name: str, every: int
) -> None:
    """Also one of a call that takes a descriptor; and what was read is read, although closing it failed.

    The last command is refused, because the model is held.
    """
    model = shutil.copytree(origin / "model", memory / name)
    if name == "merge --rebase":
        assert export_model("rollback", model, "--to", 20).code == 0
    words = [*name.split(), model]
    undisturbed, calls = commands.run(memory, Failure(), *words)
    assert undisturbed.code in (0, 5), undisturbed.err
    for number in range(1, calls + 1, 1 if THOROUGH else every):
        failure = Failure(number, errno.ESTALE, lasts=number % 2 == 0 and every > 1)
        ran, _ = commands.run(memory, failure, *words)
        assert ran.code == 0 or str(memory) in ran.err, f"{failure}: {ran.err}"


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_syncs_no_directories_is_named_and_published_to(
    commands: Commands, memory: Path, origin: Path, error: int
) -> None:
    shutil.copytree(origin, here := memory / errno.errorcode[error])
    never = Failure(1, error, lasts=True)
    ran, calls = commands.run(here, never, *words_in(here, (*COMMANDS["delta"][0], "--json")))
    assert (ran.code, calls > 2) == (0, True), ran.err
    (warning,) = ran.document["warnings"]
    assert "a power cut of its server may lose" in warning
    assert ran.err.count("warning") == 1
    examined, _ = commands.run(here, never, "doctor", here / "model", "--json")
    (finding,) = (one for one in examined.document["findings"] if one["check"] == "durability")
    assert (examined.code, finding["level"], finding["message"]) == (0, "warning", warning)
    ran, _ = commands.run(here, never, *words_in(here, ("merge", "model", "--rebase", "--json")))
    assert (ran.code, "may lose" in ran.err) == (0, True), ran.err
    assert verify_model(here / "model").problems == ()
