from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest

from exporter.storage import mirror
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.forks import run_warm
from tests.support.longest_first import Stopwatch, longest_first
from tests.support.machines import Machine, machine_in
from tests.support.mergers import merge_at_once
from tests.support.object_stores import (
    AZURITE,
    BASE,
    Bucket,
    azure_container,
    azure_server,
    google_bucket,
    google_server,
    new_bucket,
    s3_server,
)
from tests.support.once import once_a_run
from tests.support.serving_models import write_models

ROOT = Path(__file__).parent.parent
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")
"""Commands keep what they were typed with here, not in the directory of whoever runs the tests."""


@atexit.register
def _remove_states() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as cores: much of their time, tests wait for servers, leases and deadlines."""
    return len(os.sched_getaffinity(0)) * 2


def pytest_configure(config: pytest.Config) -> None:
    merge_at_once()
    hypothesis.settings.register_profile(
        "export-model",
        deadline=None,  # a slow machine is no failure: no test of ours is about time
        print_blob=True,
        max_examples=times(50),
        derandomize=config.getoption("markexpr") == "not landing",  # `make test`: nothing is left to chance
    )
    hypothesis.settings.load_profile("export-model")
    if "RECORD_DURATIONS" in os.environ:
        config.pluginmanager.register(Stopwatch())


@pytest.hookimpl(trylast=True)  # after the tests of the other tier are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


# A caller's terminal is not the tests': at 80 columns, lines that a test looks for are folded.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(name, None)

# Who starts the tests in the background of a script has SIGINT ignored, and so would every child have it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint directory that examples/ranker/train.py leaves, shared by all tests: never change it."""

    def train(directory: Path) -> None:
        run_warm(ROOT / "examples/ranker/train.py", "--out", directory, "--steps", 20)

    return once_a_run(tmp_path_factory, "ranker", train)


@pytest.fixture(scope="session")
def ranker_graph(ranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published version of the ranker, whose graph can be exported again without a builder."""
    model = f"{ROOT / 'examples/ranker/model.py'}:serving"

    def publish(directory: Path) -> None:
        ran = export_model("--ckpt-dir", ranker, "--model", model, "--out", directory)
        assert ran.code == 0, ran.err

    return once_a_run(tmp_path_factory, "ranker-graph", publish) / "20"


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` (versions 1 and 2) and `b` (version 5): a copy for the tests of one file."""
    written = once_a_run(tmp_path_factory, "two-models", write_models)
    return Path(shutil.copytree(written, tmp_path_factory.mktemp("models"), dirs_exist_ok=True))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server, a process of its own."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket of that server, which the environment leads to."""
    found = new_bucket(s3)
    _enter(found.environment, monkeypatch)
    return found


@pytest.fixture
def url(bucket: Bucket) -> str:
    """Where a model goes in a new bucket."""
    return bucket.url(BASE)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A trainer at step 30 and its model, from which other machines push and pull."""
    return machine_in(tmp_path / "one")


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment in which `gs://` leads to a stand-in, a process of its own."""
    with google_server(tmp_path_factory.mktemp("google")) as environment:
        yield environment


@pytest.fixture
def gs_bucket(google: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket of that stand-in."""
    _enter(google, monkeypatch)
    return google_bucket(google)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment in which `az://` leads to Azurite, a process of its own."""
    if not AZURITE.is_dir():
        pytest.skip("Azurite is not there: `make stores` installs it, where there is npm")
    with azure_server(tmp_path_factory.mktemp("azurite")) as environment:
        yield environment


@pytest.fixture
def container(azurite: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new container of Azurite."""
    _enter(azurite, monkeypatch)
    return azure_container(azurite)


def _enter(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for known in ("_MIRRORS", "_CHECKPOINTS"):
        monkeypatch.setattr(mirror, known, {})
