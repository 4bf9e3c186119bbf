"""A store that answers with other bytes between one look and the next: nothing that no key signed is used.

Each test runs a command against a store that changes at one of its requests: once, from then on, or until
then. The bytes are of a model that is well made and that a thief has published.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from exporter.publish.delta_log import read_log
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.transfer.pull import pull
from exporter.verify.log import verify_model
from tests.support.budget import THOROUGH
from tests.support.commands import Ran, export_model
from tests.support.directory_store import BUCKET, directory_store
from tests.support.http_proxy import Forwarding, serving
from tests.support.key_pairs import key_pair
from tests.support.logs import values_at
from tests.support.machines import files, machine_in, pushed

URL = f"s3://{BUCKET}/model"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Swaps:
    """Which requests to read something get a thief's bytes."""

    is_bad: Callable[[int], bool] = lambda _: False
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, is_bad: Callable[[int], bool]) -> None:
        self.is_bad, self.seen = is_bad, 0

    def next(self) -> bool:
        with self.lock:
            self.seen += 1
            return self.is_bad(self.seen)


@contextmanager
def swapping(address: str, thief: Path, swaps: Swaps) -> Iterator[str]:
    """A store before another, which says of each object what the other one says, whatever its bytes."""

    class Swapping(Forwarding):
        target = address

        def forward(self) -> None:
            found, path = self.ask(), thief / unquote(urlsplit(self.path).path).strip("/")
            if self.command == "GET" and path.is_file() and found.status in (200, 206) and swaps.next():
                asked = _RANGE.fullmatch(self.headers.get("Range", ""))
                start, size = int(asked[1]) if asked else 0, len(found.content)
                content = path.read_bytes()[start : start + size]
                found = replace(found, content=content.ljust(size, b" "))
            self.answer(found)

    with serving(Swapping) as here:
        yield here


@dataclass
class World:
    """A signed model in a store, its readers, and one who may write the store."""

    directory: Path
    swaps: Swaps

    @property
    def trust(self) -> Trust:
        return Trust.of([key_pair(self.directory)[1]], "model")

    def read(self, name: str = "copy") -> Path:
        """A copy that nobody deceived."""
        self.swaps.begin(lambda _: False)
        pull(URL, self.directory / name, trust=self.trust)
        return self.directory / name


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, Swaps())
    signer = Signer.of(str(key_pair(tmp_path)[0]), "model")
    with directory_store(tmp_path / "bucket") as (environment, _):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with in_force(tmp_path / "one" / "model", signer):
            machine = machine_in(tmp_path / "one")
            pushed(machine.model, URL)
        shutil.copytree(tmp_path / "bucket", tmp_path / "signed")
        shutil.rmtree(tmp_path / "bucket")
        thief = machine_in(tmp_path / "two")
        pushed(thief.model, URL)
        (tmp_path / "thief").mkdir()
        (tmp_path / "bucket").rename(tmp_path / "thief" / BUCKET)
        shutil.copytree(tmp_path / "signed", tmp_path / "bucket")
        with swapping(environment["AWS_ENDPOINT_URL"], tmp_path / "thief", world.swaps) as address:
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            yield world


def swaps_of(requests: int) -> Iterator[Callable[[int], bool]]:
    """Yield each way to swap at one of so many requests, or at some of them; the first of all is none."""
    for number in range(1, requests + 1, 1 if THOROUGH else 5):
        yield lambda now, number=number: now == number
        yield lambda now, number=number: now >= number
        yield lambda now, number=number: now < number


@pytest.mark.landing
def test_a_copy_holds_what_was_signed_alone(world: World) -> None:
    expected = files(world.read())
    requests, refused = world.swaps.seen, 0
    assert requests > 10
    for is_bad in swaps_of(requests):
        shutil.rmtree(world.directory / "copy", ignore_errors=True)
        world.swaps.begin(is_bad)
        ran = export_model("pull", URL, world.directory / "copy", "--trust", key_pair(world.directory)[1])
        refused += ran.code != 0
        found = files(world.directory / "copy")
        visible = {name: each for name, each in found.items() if not name.startswith(".pull")}
        assert visible.items() <= expected.items(), ran.err
        assert files(world.read()) == expected, ran.err
    assert refused


@pytest.mark.landing
@pytest.mark.parametrize(
    "command",
    [("merge", URL), ("merge", URL, "--rebase"), ("rollback", URL, "--to", "20"), ("export",)],
)
def test_what_a_publisher_makes_of_a_store_is_made_of_what_was_signed(
    world: World, command: tuple[str, ...]
) -> None:
    """Its own key signs what it makes: whoever may write the store must not choose it."""
    read = world.read()
    known = {values_bytes(read, position) for position in (10, 20, 30)}

    def run() -> Ran:
        key = ("--sign-key", key_pair(world.directory)[0])
        if command[0] == "export":
            return export_model("--ckpt-dir", world.directory / "one/train", "--out", URL, "--incr", *key)
        return export_model(*command, *key)

    world.swaps.begin(lambda _: False)
    done = run()
    assert done.code == 0, done.err
    requests, refused = world.swaps.seen, 0
    for is_bad in swaps_of(requests):
        for name, source in (("bucket", "signed"), ("read", None)):
            shutil.rmtree(world.directory / name, ignore_errors=True)
            if source is not None:
                shutil.copytree(world.directory / source, world.directory / name)
        world.swaps.begin(is_bad)
        ran = run()
        refused += ran.code != 0
        read = world.read("read")
        with in_force(read, trust=world.trust):
            assert verify_model(read, bytes_=True).problems == (), ran.err
        newest = read_log(read).at.position
        assert {values_bytes(read, position) for position in (10, 20, 30, newest)} <= known, ran.err
    assert refused


def values_bytes(model: Path, position: int) -> bytes:
    return b"".join(value.tobytes() for _, value in sorted(values_at(read_log(model), position).items()))
