"""Several models, policies and labels: what `HandleReloadConfigRequest` asks for."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.wire.protos import message_class
from serving.loader import LoadedModel
from serving.manager import VersionManager, load_warm
from serving.model_config import ModelConfig, listed_models
from serving.models import ServedModels
from serving.status import Code, StatusError, VersionState

WAIT_SECONDS = 60.0


@pytest.fixture
def models(two_models: Path) -> Iterator[ServedModels]:
    models = ServedModels(create)
    apply(models, config(a=two_models / "a"))
    yield models
    models.stop(5.0)


def create(model: ModelConfig) -> VersionManager:
    return VersionManager(model.name, model.base_path, policy=model.policy, poll_seconds=0.02)


def apply(models: ServedModels, wanted: Any) -> None:
    models.serve(listed_models(wanted), WAIT_SECONDS)


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


def test_another_model_is_added(models: ServedModels, two_models: Path) -> None:
    apply(models, config(a=two_models / "a", b=two_models / "b"))
    assert answer(models, "a") == (2, 2.0)
    assert answer(models, "b") == (5, 5.0)


def test_a_model_that_is_left_out_goes(models: ServedModels, two_models: Path) -> None:
    apply(models, config(b=two_models / "b"))
    assert answer(models, "b") == (5, 5.0)
    with pytest.raises(StatusError, match=r"Latest\(a\)"):
        answer(models, "a")


def test_versions_stay_loaded_when_their_model_stays(models: ServedModels, two_models: Path) -> None:
    with models.borrow(spec("a")) as (_, before):
        pass
    apply(models, config(a=two_models / "a", b=two_models / "b"))
    with models.borrow(spec("a")) as (_, after):
        assert after is before


def test_a_model_moves_to_another_base_path(models: ServedModels, two_models: Path) -> None:
    apply(models, config(a=two_models / "b"))
    wait_for(models, (2, VersionState.END), (5, VersionState.AVAILABLE))
    assert answer(models, "a") == (5, 5.0)


def wait_for(models: ServedModels, *expected: tuple[int, VersionState]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while {(s.version, s.state) for s in models.statuses(spec("a"))} != set(expected):
        assert time.monotonic() < deadline, models.statuses(spec("a"))
        time.sleep(0.01)


def test_policies_and_labels(models: ServedModels, two_models: Path) -> None:
    wanted = config(a=two_models / "a")
    (model,) = wanted.model_config_list.config
    model.model_version_policy.specific.versions.extend([1, 2])
    apply(models, wanted)
    wait_for(models, (1, VersionState.AVAILABLE), (2, VersionState.AVAILABLE))
    model.version_labels["stable"] = 1
    apply(models, wanted)
    assert answer(models, "a", label="stable") == (1, 1.0)
    assert models.statuses(spec("a", label="stable"))[0].version == 1
    model.version_labels["stable"] = 2
    apply(models, wanted)
    assert answer(models, "a", label="stable") == (2, 2.0)


def test_a_label_that_moves_while_it_is_looked_up(
    models: ServedModels, two_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that it named is unloaded before the request has borrowed it."""
    apply(models, labelled(two_models, 2, 2))
    stale = [1]  # what the label named a moment ago
    look_up = models._version
    monkeypatch.setattr(models, "_version", lambda spec: stale.pop() if stale else look_up(spec))
    assert answer(models, "a", label="stable") == (2, 2.0)
    assert not stale
    with pytest.raises(StatusError, match=r"Specific\(a, 1\)"):
        answer(models, "a", 1)


@pytest.mark.parametrize(("choice", "count"), [("all", 0), ("latest", 2)])
def test_policies_by_number(models: ServedModels, two_models: Path, choice: str, count: int) -> None:
    wanted = config(a=two_models / "a")
    policy = wanted.model_config_list.config[0].model_version_policy
    getattr(policy, choice).SetInParent()
    if count:
        policy.latest.num_versions = count
    apply(models, wanted)
    wait_for(models, (1, VersionState.AVAILABLE), (2, VersionState.AVAILABLE))


def labelled(two_models: Path, version: int, *served: int) -> Any:
    wanted = config(a=two_models / "a")
    (model,) = wanted.model_config_list.config
    model.version_labels["stable"] = version
    model.model_version_policy.specific.versions.extend(served or [1, 2])
    return wanted


def test_a_label_for_a_version_that_is_not_available(models: ServedModels, two_models: Path) -> None:
    """It is refused at once: what is not available now may never be."""
    with pytest.raises(StatusError, match="Request to assign label to version 1 of model a") as caught:
        apply(models, labelled(two_models, 1))
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert answer(models, "a") == (2, 2.0)
    assert [(s.version, s.state) for s in models.versions("a")] == [(2, VersionState.AVAILABLE)]


def test_labels_before_versions_if_that_is_allowed(two_models: Path) -> None:
    models = ServedModels(create, labels_unavailable_versions=True)
    try:
        apply(models, labelled(two_models, 1))
        wait_for(models, (1, VersionState.AVAILABLE), (2, VersionState.AVAILABLE))
        assert answer(models, "a", label="stable") == (1, 1.0)
        with pytest.raises(StatusError, match="version 9 of model a"):  # it would leave requests without one
            apply(models, labelled(two_models, 9))
        assert answer(models, "a", label="stable") == (1, 1.0)
    finally:
        models.stop(5.0)


def test_a_new_model_that_cannot_be_served(models: ServedModels, two_models: Path, tmp_path: Path) -> None:
    """As in TF Serving it stays in the configuration, and tells why it is not served."""
    shutil.copytree(two_models / "b", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "5" / "variables")
    with pytest.raises(StatusError, match=r"1 model\(s\) did not become available: version 5 of c") as caught:
        apply(models, config(a=two_models / "a", c=tmp_path / "broken"))
    assert caught.value.code is Code.UNKNOWN
    assert answer(models, "a") == (2, 2.0)
    (status,) = models.statuses(spec("c"))
    assert (status.version, status.state, status.code) == (5, VersionState.END, Code.UNKNOWN)
    apply(models, config(a=two_models / "a"))
    assert models.statuses(spec("c")) == [status]
    apply_later = config(a=two_models / "a", c=two_models / "b")
    apply(models, apply_later)
    assert answer(models, "c") == (5, 5.0)


def test_a_base_path_that_cannot_be_served_keeps_what_is(
    models: ServedModels, two_models: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_models / "b", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "5" / "variables")
    apply(models, config(a=tmp_path / "broken"))
    wait_for(models, (2, VersionState.AVAILABLE), (5, VersionState.END))
    assert answer(models, "a") == (2, 2.0)


def test_a_model_that_was_taken_out_tells_how_it_ended(models: ServedModels, two_models: Path) -> None:
    apply(models, config(b=two_models / "b"))
    wait_for(models, (2, VersionState.END))
    assert models.served().keys() == {"b"}
    apply(models, config(a=two_models / "a", b=two_models / "b"))
    assert answer(models, "a") == (2, 2.0)


def test_a_model_may_leave_and_come_back_at_once(models: ServedModels, two_models: Path) -> None:
    for _ in range(20):
        models.configure(listed_models(config(b=two_models / "b")))
        models.configure(listed_models(config(a=two_models / "a")))
    apply(models, config(a=two_models / "a", b=two_models / "b"))
    wait_for(models, (2, VersionState.AVAILABLE))
    assert answer(models, "a") == (2, 2.0)


def test_a_model_that_is_taken_out_while_it_is_waited_for(
    models: ServedModels, two_models: Path, tmp_path: Path
) -> None:
    """Two configurations at once: the first call does not wait for what the second one took away."""
    taking = threading.Timer(0.2, lambda: models.configure(listed_models(config(a=two_models / "a"))))
    taking.start()
    with pytest.raises(StatusError, match="c is no longer served: it was removed") as caught:
        apply(models, config(a=two_models / "a", c=tmp_path / "later"))
    assert caught.value.code is Code.UNKNOWN
    assert answer(models, "a") == (2, 2.0)


def test_configurations_at_once(models: ServedModels, two_models: Path) -> None:
    def swing(name: str) -> None:
        for _ in range(20):
            with suppress(StatusError):  # another call may take the model out while this one waits for it
                apply(models, config(a=two_models / "a", **{name: two_models / "b"}))

    threads = [threading.Thread(target=swing, args=(name,)) for name in ("b", "c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    apply(models, config(a=two_models / "a", d=two_models / "b"))
    assert models.served().keys() == {"a", "d"}
    assert answer(models, "d") == (5, 5.0)
    for name in ("b", "c"):
        deadline = time.monotonic() + WAIT_SECONDS
        while any(s.state is not VersionState.END for s in models.versions(name)):
            assert time.monotonic() < deadline, models.versions(name)
            time.sleep(0.01)


class SlowLoads:
    """A loader that begins when it is let."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.began = threading.Event()

    def create(self, model: ModelConfig) -> VersionManager:
        return VersionManager(
            model.name, model.base_path, policy=model.policy, poll_seconds=0.02, load=self._load
        )

    def _load(self, directory: Path) -> LoadedModel:
        self.began.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        return load_warm(directory)


@pytest.fixture
def slow() -> Iterator[tuple[ServedModels, SlowLoads]]:
    loads = SlowLoads()
    models = ServedModels(loads.create)
    yield models, loads
    loads.may_go_on.set()
    models.stop(5.0)


@pytest.mark.parametrize("first_one_waits", [True, False])
def test_what_another_call_took_up_is_waited_for(
    slow: tuple[ServedModels, SlowLoads], two_models: Path, first_one_waits: bool
) -> None:
    """A configuration that says the same while the model is loaded is answered when it is available."""
    models, loads = slow
    wanted = config(b=two_models / "b")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(apply if first_one_waits else configure, models, wanted)
        assert loads.began.wait(WAIT_SECONDS)
        with pytest.raises(StatusError, match="version 5 is still loading") as caught:
            models.serve(listed_models(wanted), 0.05)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        second = pool.submit(apply, models, wanted)
        loads.may_go_on.set()
        second.result(WAIT_SECONDS)
        assert answer(models, "b") == (5, 5.0)
        first.result(WAIT_SECONDS)


def configure(models: ServedModels, wanted: Any) -> None:
    models.configure(listed_models(wanted))


def test_a_model_that_never_came_is_waited_for_as_long_as_another_call_waits(
    models: ServedModels, two_models: Path, tmp_path: Path
) -> None:
    wanted = config(a=two_models / "a", c=tmp_path / "later")
    is_wanted = threading.Event()
    is_wanted.set()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(models.serve, listed_models(wanted), WAIT_SECONDS, is_wanted.is_set)
        while not models.served().keys() >= {"c"}:
            time.sleep(0.01)
        with pytest.raises(StatusError, match="later is not a directory"):
            models.serve(listed_models(wanted), 0.05)
        is_wanted.clear()
        with pytest.raises(StatusError, match="later is not a directory"):
            first.result(WAIT_SECONDS)
    while models.served()["c"].is_coming():
        time.sleep(0.01)
    apply(models, wanted)  # nobody waits for it any more
    assert not models.is_available("c")


def test_a_model_that_comes_back_while_it_is_unloaded(
    models: ServedModels, two_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded before is about to go: it makes nothing available."""
    began, may_go_on = threading.Event(), threading.Event()
    both = config(a=two_models / "a", b=two_models / "b")
    apply(models, both)
    manager = models.served()["b"]
    begin_unload = manager._begin_unload

    def begin_late(version: int) -> None:
        began.set()
        assert may_go_on.wait(WAIT_SECONDS)
        begin_unload(version)

    monkeypatch.setattr(manager, "_begin_unload", begin_late)
    configure(models, config(a=two_models / "a"))
    assert began.wait(WAIT_SECONDS)
    with pytest.raises(StatusError, match="did not become available"):
        models.serve(listed_models(both), 0.05)
    may_go_on.set()
    apply(models, both)
    assert answer(models, "b") == (5, 5.0)


def test_no_configuration_after_the_end(models: ServedModels, two_models: Path) -> None:
    models.stop(5.0)
    with pytest.raises(StatusError, match="the server is stopping") as caught:
        models.configure(listed_models(config(b=two_models / "b")))
    assert caught.value.code is Code.UNAVAILABLE


def test_a_base_path_that_is_not_there_yet(models: ServedModels, two_models: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    with pytest.raises(StatusError, match="later is not a directory") as caught:
        models.serve(listed_models(config(a=two_models / "a", c=later)), 0.1)
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    with pytest.raises(StatusError, match="Could not find any versions of model c"):
        models.statuses(spec("c"))
    shutil.copytree(two_models / "b", tmp_path / "copied").rename(
        later
    )  # a version that is half there has failed
    models.served()["c"].wait_available(WAIT_SECONDS)
    assert answer(models, "c") == (5, 5.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.custom_model_config.SetInParent(), "Only ModelConfigList is currently supported"),
        (lambda c: c.model_config_list.config.add(name="a", base_path="/x", model_platform="tensorflow"),
         "Illegal to list model a multiple times in config list"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="x", model_platform="tensorflow"),
         r"Expected model x to have an absolute path or URI; got base_path\(\)=x"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="/x", model_platform="torch"),
         "Model x requests unsupported platform torch"),
        (lambda c: setattr(c.model_config_list.config[0], "model_platform", "torch"),
         "Illegal to change a model's platform. For model a platform was tensorflow"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="/x"), "Illegal setting neither"),
        (lambda c: setattr(c.model_config_list.config[0], "model_type", 1), "Illegal setting both"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="/x", model_type=2), "not supported"),
        (lambda c: c.model_config_list.config.add(name="x"), "needs a name and a base_path"),
        (lambda c: c.model_config_list.config.add(base_path="/x"), "needs a name and a base_path"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="gs://b/m"), "gs://b/m: only local"),
        (lambda c: c.model_config_list.config.add(name="x", base_path="file://far/m"), "file://far/m"),
    ],
)  # fmt: skip
def test_refused_configurations(models: ServedModels, two_models: Path, change: Any, text: str) -> None:
    wanted = config(a=two_models / "a")
    change(wanted)
    with pytest.raises(StatusError, match=text) as caught:
        apply(models, wanted)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert answer(models, "a") == (2, 2.0)


def test_a_base_path_may_be_a_local_url(models: ServedModels, two_models: Path) -> None:
    apply(models, config(a=f"file://{two_models / 'b'}"))
    wait_for(models, (2, VersionState.END), (5, VersionState.AVAILABLE))
    assert answer(models, "a")[0] == 5
