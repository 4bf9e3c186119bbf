"""Several models, policies and labels: what `HandleReloadConfigRequest` asks for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.wire.protos import message_class
from serving.manager import VersionManager
from serving.models import ServedModels
from serving.status import Code, StatusError, VersionState
from serving.version_policy import Latest, Policy
from tests.support.serving_models import write_saved_model

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` (versions 1 and 2) and `b` (version 5); version n multiplies by n."""
    root = tmp_path_factory.mktemp("models")
    for name, version in (("a", 1), ("a", 2), ("b", 5)):
        write_saved_model(root / name / str(version), scale=version)
    return root


@pytest.fixture
def models(made: Path) -> Iterator[ServedModels]:
    def create(name: str, base_path: Path, policy: Policy) -> VersionManager:
        return VersionManager(name, base_path, policy=policy, poll_seconds=0.02)

    models = ServedModels(create)
    models.add("a", made / "a", Latest()).wait_available(WAIT_SECONDS)
    yield models
    models.stop(5.0)


def spec(name: str, version: int | None = None, label: str = "") -> Any:
    message = message_class("serving.ModelSpec")(name=name)
    if version is not None:
        message.version.value = version
    if label:
        message.version_label = label
    return message


def config(**base_paths: Path) -> Any:
    message = message_class("serving.ModelServerConfig")()
    message.model_config_list.SetInParent()
    for name, path in base_paths.items():
        message.model_config_list.config.add(name=name, base_path=str(path), model_platform="tensorflow")
    return message


def answer(models: ServedModels, *asked: Any, **options: Any) -> tuple[int, float]:
    with models.borrow(spec(*asked, **options)) as (version, model):
        (y,) = model.run({"x:0": np.ones((1, 2), np.float32)}, ["y:0"])
        return version, float(y[0, 0])


def test_another_model_is_added(models: ServedModels, made: Path) -> None:
    models.configure(config(a=made / "a", b=made / "b"), WAIT_SECONDS)
    assert answer(models, "a") == (2, 2.0)
    assert answer(models, "b") == (5, 5.0)


def test_a_model_that_is_left_out_goes(models: ServedModels, made: Path) -> None:
    models.configure(config(b=made / "b"), WAIT_SECONDS)
    assert answer(models, "b") == (5, 5.0)
    with pytest.raises(StatusError, match=r"Latest\(a\)"):
        answer(models, "a")


def test_versions_stay_loaded_when_their_model_stays(models: ServedModels, made: Path) -> None:
    with models.borrow(spec("a")) as (_, before):
        pass
    models.configure(config(a=made / "a", b=made / "b"), WAIT_SECONDS)
    with models.borrow(spec("a")) as (_, after):
        assert after is before


def test_a_model_moves_to_another_base_path(models: ServedModels, made: Path) -> None:
    models.configure(config(a=made / "b"), WAIT_SECONDS)
    assert answer(models, "a") == (5, 5.0)


def wait_for(models: ServedModels, *expected: tuple[int, VersionState]) -> None:
    import time

    deadline = time.monotonic() + WAIT_SECONDS
    while {(s.version, s.state) for s in models.statuses(spec("a"))} != set(expected):
        assert time.monotonic() < deadline, models.statuses(spec("a"))
        time.sleep(0.01)


def test_policies_and_labels(models: ServedModels, made: Path) -> None:
    wanted = config(a=made / "a")
    (model,) = wanted.model_config_list.config
    model.model_version_policy.specific.versions.extend([1, 2])
    models.configure(wanted, WAIT_SECONDS)
    wait_for(models, (1, VersionState.AVAILABLE), (2, VersionState.AVAILABLE))
    model.version_labels["stable"] = 1
    models.configure(wanted, WAIT_SECONDS)
    assert answer(models, "a", label="stable") == (1, 1.0)
    assert models.statuses(spec("a", label="stable"))[0].version == 1
    model.version_labels["stable"] = 2
    models.configure(wanted, WAIT_SECONDS)
    assert answer(models, "a", label="stable") == (2, 2.0)


@pytest.mark.parametrize(("choice", "count"), [("all", 0), ("latest", 2)])
def test_policies_by_number(models: ServedModels, made: Path, choice: str, count: int) -> None:
    wanted = config(a=made / "a")
    policy = wanted.model_config_list.config[0].model_version_policy
    getattr(policy, choice).SetInParent()
    if count:
        policy.latest.num_versions = count
    models.configure(wanted, WAIT_SECONDS)
    wait_for(models, (1, VersionState.AVAILABLE), (2, VersionState.AVAILABLE))


def test_a_label_for_a_version_that_is_not_available(models: ServedModels, made: Path) -> None:
    wanted = config(a=made / "a")
    wanted.model_config_list.config[0].version_labels["stable"] = 1
    with pytest.raises(StatusError, match="Request to assign label to version 1 of model a") as caught:
        models.configure(wanted, WAIT_SECONDS)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert answer(models, "a") == (2, 2.0)


def test_a_model_that_cannot_be_served_changes_nothing(
    models: ServedModels, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "b", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "5" / "variables")
    with pytest.raises(StatusError, match="version 5 of a cannot be served") as caught:
        models.configure(config(a=tmp_path / "broken"), WAIT_SECONDS)
    assert caught.value.code is Code.UNKNOWN
    assert answer(models, "a") == (2, 2.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.ClearField("model_config_list"), "Only ModelConfigList is currently supported"),
        (lambda c: c.model_config_list.config.add(name="x"), "needs a name and a base_path"),
        (lambda c: c.model_config_list.config.add(base_path="/x"), "needs a name and a base_path"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="gs://b/m"), "gs://b/m: only local"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="file://far/m"), "file://far/m"),
    ],
)
def test_refused_configurations(models: ServedModels, made: Path, change: Any, text: str) -> None:
    wanted = config(a=made / "a")
    change(wanted)
    with pytest.raises(StatusError, match=text) as caught:
        models.configure(wanted, WAIT_SECONDS)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert answer(models, "a") == (2, 2.0)


def test_a_base_path_may_be_a_local_url(models: ServedModels, made: Path) -> None:
    models.configure(config(a=f"file://{made / 'b'}"), WAIT_SECONDS)
    assert answer(models, "a")[0] == 5
