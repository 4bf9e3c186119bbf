from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from msgspec.structs import fields, replace

from exporter.cli import app as cli
from exporter.errors import ExportFailed, UsageError
from exporter.newer_python import module_command
from exporter.options import (
    DataMode,
    DeltaDtype,
    EngineName,
    ExportFormat,
    ExportRequest,
    Isolation,
    Jobs,
    Signing,
    Updates,
    Verify,
)
from exporter.publish.delta_log import read_log
from exporter.training import ExportCallback, ExportHook, roles
from exporter.training.exports import ExportArguments, Exports, NewCheckpoints, export_environment
from exporter.transfer.pull import pull
from tests.support.object_stores import Bucket

v1 = tf.compat.v1

FULL = ExportRequest(
    ckpt_dir=Path("train dir"),
    out=Path("models/a"),
    model="my model.py:fn",
    model_args={"dim": "8", "name": "a=b"},
    inputs={"x": "Placeholder:0"},
    outputs={"y": "Softmax:0", "z": "Top:1"},
    signatures=Path("signatures.json"),
    feeds={"keep_prob": "1.0"},
    absent_keys={"user.*": "0.5"},
    renames=(r"a/(.*)=b/\1", "-c=d"),
    rename_file=Path("names"),
    by_order=True,
    average="ema",
    casts=("emb.*=bfloat16",),
    partition_strategies={"table": "mod"},
    ignored=("lora_.*",),
    object_path="net/tower",
    data=DataMode.COMPACT,
    warmup=Path("warm.jsonl"),
    version="7",
    keep=3,
    keep_hourly=2,
    keep_daily=7,
    verify=Verify.OUTPUTS,
    verify_inputs=Path("probe.jsonl"),
    tolerance=1e-3,
    updates=Updates(Isolation.ROW, 5, stamp=True, digest=True, finite=True),
    format=ExportFormat.BOTH,
    for_server="2.4",
    allow=("code", "foreign-ops", "files=/data", "files=words", "file-ops", "batch-statistics", "dropout"),
    despite_hold=True,
    again=True,
    custom_objects=("pkg.mod", "other"),
    tag="serve",
    train_tag="train",
    min_freq=2,
    max_age_steps=1000,
    table_head_room=0.5,
    golden=Path("golden.jsonl"),
    jobs=Jobs(EngineName.DASK, 3, "tcp://h:8786", {"retries": "2"}, 1 << 27, "s3://bucket/jobs"),
    signing=Signing("env:SIGNING", "ranker"),
)
MAPPED = replace(
    FULL,
    updates=None,
    plain=True,
    map_tables=True,
    served_at="/models/ranker",
    overlay_rows=5,
    hot_rows={"emb": "hot.npy"},
)


def as_parsed(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> ExportRequest:
    """What the command line makes of arguments."""
    from exporter.pipeline import full

    class Parsed(Exception):
        pass

    def stop(request: ExportRequest, *_: Any) -> None:
        raise KeyboardInterrupt(request)

    key = ["openssl", "genpkey", "-algorithm", "ed25519"]
    monkeypatch.setenv("SIGNING", subprocess.run(key, check=True, capture_output=True, text=True).stdout)
    seen: list[ExportRequest] = []
    monkeypatch.setattr(full, "export", lambda request, *_: seen.append(request) or stop(request))
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--quiet"])
    return seen[0]


@pytest.mark.parametrize(
    "request_",
    [FULL, MAPPED, ExportRequest(Path("train"), Path("models/b"))],
    ids=["takes deltas", "plain", "no options"],
)
def test_arguments_say_what_a_request_says(request_: ExportRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ExportArguments.of(request_)
    checkpoint = Path("train/model.ckpt-7")
    expected = replace(request_, ckpt_dir=checkpoint)
    if request_.model is None:  # the trainer's own graph
        expected = replace(expected, allow=("files=/",))
    assert as_parsed(arguments.at(checkpoint), monkeypatch) == expected


def test_every_option_of_a_request_is_covered() -> None:
    plain = ExportRequest(Path("train"), Path("out"))
    same = [field.name for field in fields(FULL) if getattr(FULL, field.name) == getattr(plain, field.name)]
    # The first ones go with --incr, which arguments alone can say; --requests none does not go with a file.
    # MAPPED has those that do not go with deltas.
    assert {*same} <= {
        "min_change",
        "delta_dtype",
        "delta_budget",
        "max_row_age",
        "max_norm",
        "on_wild",
        "check_graph",
        "no_warmup",
        "plain",
        "map_tables",
        "served_at",
        "overlay_rows",
        "hot_rows",
    }


@pytest.mark.parametrize("text", [["--ckpt-dir", "d", "--out", "m"], ["--out", "m", "--ckpt-dir=d"]])
def test_arguments_of_the_command_are_taken_apart(text: list[str]) -> None:
    arguments = ExportArguments.of(text)
    assert arguments.ckpt_dir == Path("d")
    own_graph = "--allow=files=/"  # which this process has written beside the checkpoint
    assert arguments.at(Path("d/ckpt-1")) == ("--ckpt-dir", "d/ckpt-1", own_graph, "--out", "m")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (["--ckpt-dir", "d"], "--out is missing"),
        (["--ckpt-dir=d", "--out=m", "--watch"], "never ends"),
        (["--ckpt-dir", "d", "--out", "m", "--keep", 3], r"what\[5\]=3: expected a string or a path"),
    ],
)
def test_arguments_that_would_fail_once_training_is_over(what: list[Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ExportHook(what)


@pytest.mark.parametrize("what", [["--out", "m"], ["--ckpt-dir"], "--ckpt-dir d", []])
def test_arguments_without_a_directory_are_refused(what: Any) -> None:
    with pytest.raises(UsageError, match="--ckpt-dir DIR"):
        ExportHook(what)


def test_a_function_cannot_be_handed_to_another_process() -> None:
    with pytest.raises(UsageError, match="needs the builder's name"):
        ExportHook(ExportRequest(Path("a"), Path("b"), model=lambda: None))


@pytest.mark.parametrize(
    "options",
    [{"min_change": 0.1}, {"delta_dtype": DeltaDtype.INT8}, {"check_graph": True}, {"delta_budget": "1MB/s"}],
)
@pytest.mark.parametrize("made", [ExportHook, ExportCallback])
def test_what_only_deltas_are_told_is_refused_before_the_training(made: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="are for deltas") as caught:
        made(ExportRequest(Path("a"), Path("b"), **options))
    assert "--incr" in caught.value.hint


@pytest.mark.parametrize("options", [{"every_checkpoints": 0}, {"wait_seconds": 0}])
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ExportHook(ExportRequest(Path("a"), Path("b")), **options)


def test_an_export_may_be_waited_for_less_than_a_second() -> None:
    assert ExportHook(ExportRequest(Path("a"), Path("b")), wait_seconds=0.5)


def test_the_export_has_no_role_and_no_gpu() -> None:
    environ = {
        "TF_CONFIG": json.dumps({"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}),
        "JOB_NAME": "ps",
        "TASK_INDEX": "1",
        "PS_HOSTS": "a:1,b:1",
        "AUTODIST_WORKER": "b",
        "HOROVOD_RANK": "3",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/bin",
    }
    made = export_environment(environ)
    assert roles.node_role(made) == roles.SINGLE
    assert made["CUDA_VISIBLE_DEVICES"] == "-1"
    assert made["PATH"] == "/bin"


@pytest.mark.parametrize("python", [(3, 10), (3, 11)])
def test_the_module_runs_as_the_command_whatever_lies_in_the_working_directory(
    python: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 has no option for that: the command line that it gets runs here, too."""
    monkeypatch.setattr(sys, "version_info", python)
    command = module_command("exporter")
    monkeypatch.undo()
    (tmp_path / "typing.py").write_text("raise SystemExit('a file of the trainer was imported')")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "export-model --ckpt-dir" in done.stdout


# --- sightings ---------------------------------------------------------------------------------------------


def test_sightings(tmp_path: Path) -> None:
    sightings = NewCheckpoints(tmp_path / "train")
    assert sightings.new() is None
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, tmp_path / "train", max_to_keep=2)
    for number in (9, 10, 11):
        assert sightings.new() is None
        manager.save(number)
        assert sightings.new() == tmp_path / "train" / f"ckpt-{number}"
    assert sightings.new() is None
    assert sightings.newest == tmp_path / "train" / "ckpt-11"


def test_an_archive_that_is_written_over_is_new(tmp_path: Path) -> None:
    sightings = NewCheckpoints(tmp_path)
    archive = tmp_path / "model.weights.h5"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for _ in range(2):
        model.save_weights(archive)
        assert sightings.new() == archive
        assert sightings.new() is None
        time.sleep(0.01)  # the clock of file times is coarse


# --- sessions ----------------------------------------------------------------------------------------------


def train(
    directory: Path, hooks: list[Any], steps: int = 6, each: Any = None, save_every: int = 2
) -> dict[str, Any]:
    """A monitored session's training; `each` is called after each step. What the trainer itself computes."""
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        step = v1.train.get_or_create_global_step()
        x = v1.placeholder_with_default(tf.ones([1, 3]), [None, 3], name="x")
        w = v1.get_variable("w", [3, 2], use_resource=True)
        y = tf.identity(x @ w, name="y")
        train_op = v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum((y - 1.0) ** 2), step)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(directory),
            save_checkpoint_steps=save_every,
            save_checkpoint_secs=None,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
            hooks=hooks,
        ) as session:
            reached = 0
            while not session.should_stop() and reached < steps:
                session.run(train_op)
                reached += 1
                if each is not None:
                    each(reached)
            final = None if session.should_stop() else session.run({"y": y, "w": w})
    return final or {}


def request_of(directory: Path, **options: Any) -> ExportRequest:
    inputs, outputs = {"x": "x:0"}, {"y": "y:0"}
    return ExportRequest(directory / "train", directory / "model", inputs=inputs, outputs=outputs, **options)


def served(version: Path, x: Any) -> Any:
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        loaded = v1.saved_model.load(session, ["serve"], str(version))
        signature = loaded.signature_def["serving_default"]
        (given,), (wanted,) = signature.inputs.values(), signature.outputs.values()
        return session.run(wanted.name, {given.name: x})


def versions(model: Path) -> list[int]:
    return sorted(int(path.name) for path in model.iterdir() if path.name.isdecimal())


def test_the_last_checkpoint_is_exported_when_training_ends(tmp_path: Path) -> None:
    hook = ExportHook(request_of(tmp_path), raise_on_failure=True)
    final = train(tmp_path / "train", [hook], steps=5)
    assert versions(tmp_path / "model") == [5]
    (outcome,) = hook.outcomes
    assert outcome.is_done
    assert outcome.document["path"] == str(tmp_path / "model" / "5")
    assert outcome.checkpoint == tmp_path / "train" / "model.ckpt-5"
    np.testing.assert_array_equal(served(tmp_path / "model" / "5", np.ones([1, 3])), final["y"])


@pytest.mark.landing
@pytest.mark.parametrize(("steps", "exported"), [(7, [4, 7]), (8, [4, 8])])
def test_every_second_checkpoint_is_exported_and_none_twice(
    tmp_path: Path, steps: int, exported: list[int]
) -> None:
    """Saved at 2, 4, 6 and the end. Each export is awaited, so that none takes another's place."""
    hook = ExportHook(request_of(tmp_path), every_checkpoints=2)
    train(tmp_path / "train", [hook], steps, each=lambda step: hook._schedule.exports.finish(120))
    assert [outcome.checkpoint.name for outcome in hook.outcomes] == [f"model.ckpt-{at}" for at in exported]
    assert versions(tmp_path / "model") == exported


@pytest.mark.landing
def test_deltas_are_exported_by_the_commands_own_arguments(tmp_path: Path) -> None:
    arguments = ["--ckpt-dir", tmp_path / "train", "--out", tmp_path / "model", "--incr"]
    hook = ExportHook([*arguments, "--input", "x=x:0", "--output", "y=y:0"], every_checkpoints=1)
    train(tmp_path / "train", [hook], 5, each=lambda step: hook._schedule.exports.finish(120))
    assert [outcome.message for outcome in hook.outcomes] == ["", "", ""]
    assert versions(tmp_path / "model") == [2]
    deltas = sorted(path.name for path in (tmp_path / "model" / "deltas").glob("*/*-*"))
    assert [tuple(map(int, name.split("-"))) for name in deltas] == [(2, 4), (4, 5)]


@pytest.mark.landing
def test_a_training_publishes_to_a_url(tmp_path: Path, bucket: Bucket) -> None:
    """Its exports are commands, which take one: the trainer's machine keeps no model."""
    url = bucket.url("models/m")
    arguments = ["--ckpt-dir", str(tmp_path / "train"), "--out", url, "--incr"]
    hook = ExportHook([*arguments, "--input", "x=x:0", "--output", "y=y:0"], every_checkpoints=1)
    final = train(tmp_path / "train", [hook], 5, each=lambda step: hook._schedule.exports.finish(120))
    assert [outcome.message for outcome in hook.outcomes] == ["", "", ""]
    assert pull(url, tmp_path / "here").position == 5
    state = read_log(tmp_path / "here").state()
    np.testing.assert_array_equal(state.whole("w"), final["w"])


def test_training_that_is_continued_exports_what_is_new(tmp_path: Path) -> None:
    train(tmp_path / "train", [], steps=4)
    hook = ExportHook(request_of(tmp_path), every_checkpoints=1)
    train(tmp_path / "train", [hook], steps=1, save_every=100)
    assert versions(tmp_path / "model") == [5]


def test_a_worker_exports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    hook = ExportHook(request_of(tmp_path), every_checkpoints=1)
    train(tmp_path / "train", [hook], steps=3)
    assert hook.outcomes == ()
    assert not (tmp_path / "model").exists()


@pytest.mark.landing
def test_a_chief_of_a_cluster_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child must not take itself for a part of the cluster, nor the trainer's GPU."""
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "seen.py").write_text(
        "import json, os, sys\n"
        "import tensorflow as tf\n"
        "def serving():\n"
        f"    names = {{n: os.environ.get(n) for n in ('TF_CONFIG', 'CUDA_VISIBLE_DEVICES')}}\n"
        f"    open({str(tmp_path / 'env.json')!r}, 'w').write(json.dumps(names))\n"
        "    x = tf.compat.v1.placeholder(tf.float32, [None, 3])\n"
        "    return {'x': x}, {'y': x @ tf.compat.v1.get_variable('w', [3, 2])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # where the trainer's own modules are
    request = ExportRequest(tmp_path / "train", tmp_path / "model", model="seen:serving")
    final = train(tmp_path / "train", [ExportHook(request, raise_on_failure=True)], steps=3)
    seen = json.loads((tmp_path / "env.json").read_text())
    assert seen == {"TF_CONFIG": None, "CUDA_VISIBLE_DEVICES": "-1"}
    np.testing.assert_array_equal(served(tmp_path / "model" / "3", np.ones([1, 3])), final["y"])


def test_a_failure_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook = ExportHook(replace(request_of(tmp_path), outputs={"y": "nothing:0"}))
    train(tmp_path / "train", [hook], steps=2)
    (outcome,) = hook.outcomes
    assert not outcome.is_done
    assert (outcome.exit_code, outcome.error) == (2, "UnknownTensor")
    assert "nothing" in outcome.message
    assert json.loads(outcome.last_line)["error"] == "UnknownTensor"
    assert "failed with exit code 2" in caplog.text


def test_a_failure_is_raised_if_asked(tmp_path: Path) -> None:
    hook = ExportHook(replace(request_of(tmp_path), outputs={"y": "nothing:0"}), raise_on_failure=True)
    with pytest.raises(ExportFailed, match=r"model\.ckpt-2 failed with exit code 2") as caught:
        train(tmp_path / "train", [hook], steps=2)
    assert "nothing" in caught.value.cause
    assert tf.train.latest_checkpoint(str(tmp_path / "train")).endswith("model.ckpt-2")


def test_no_checkpoint_is_a_failure(tmp_path: Path) -> None:
    hook = ExportHook(replace(request_of(tmp_path), ckpt_dir=tmp_path / "other"), raise_on_failure=True)
    with pytest.raises(ExportFailed, match="nothing was exported"):
        train(tmp_path / "train", [hook], steps=2)


# --- processes ---------------------------------------------------------------------------------------------

SLOW = """
import time
from pathlib import Path
Path({begun!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.02)
def serving():
    import tensorflow as tf
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    return {{"x": x}}, {{"y": x @ tf.compat.v1.get_variable("w", [3, 2])}}
"""


def slow_exports(directory: Path) -> Exports:
    """Exports that go on only when a file `go` appears, of a finished training's checkpoints."""
    train(directory / "train", [], steps=9)
    code = SLOW.format(begun=str(directory / "begun"), go=str(directory / "go"))
    (directory / "slow.py").write_text(code)
    model = f"{directory / 'slow.py'}:serving"
    return Exports(ExportRequest(directory / "train", directory / "model", model=model))


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def prefixes(directory: Path) -> list[Path]:
    state = tf.train.get_checkpoint_state(str(directory / "train"))
    return [Path(path) for path in state.all_model_checkpoint_paths]


@pytest.mark.landing
def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(tmp_path: Path) -> None:
    exports = slow_exports(tmp_path)
    first, second, third = prefixes(tmp_path)[-3:]
    exports.start(first)
    await_file(tmp_path / "begun")
    exports.start(second)
    exports.start(third)
    (tmp_path / "go").touch()
    last = exports.finish(math.inf)
    assert last is exports.outcomes[-1]
    assert [outcome.checkpoint for outcome in exports.outcomes] == [first, third]
    steps = [int(path.name.rpartition("-")[2]) for path in (first, third)]
    assert versions(tmp_path / "model") == steps


@pytest.mark.landing
def test_the_checkpoint_that_was_meant_is_exported_and_the_newest_if_it_was_pruned(tmp_path: Path) -> None:
    train(tmp_path / "train", [], steps=9)
    exports = Exports(request_of(tmp_path))
    first, second, *_, newest = prefixes(tmp_path)
    exports.start(second)
    exports.finish(120)
    for file in first.parent.glob(f"{first.name}.*"):
        file.unlink()
    exports.start(first)
    exports.finish(120)
    assert [outcome.checkpoint for outcome in exports.outcomes] == [second, newest]
    assert all(outcome.is_done for outcome in exports.outcomes)


@pytest.mark.landing
def test_an_export_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    exports = slow_exports(tmp_path)
    exports.start(prefixes(tmp_path)[-1])
    await_file(tmp_path / "begun")
    outcome = exports.finish(0.1)
    assert outcome is not None
    assert outcome.exit_code == 130
    assert outcome.message == "not done after 0.1 s, stopped"
    assert not (tmp_path / "model").exists()


@pytest.mark.landing
def test_one_that_waits_for_an_export_that_takes_too_long_is_told(tmp_path: Path) -> None:
    exports = slow_exports(tmp_path)
    first, second = prefixes(tmp_path)[-2:]
    exports.start(first)
    await_file(tmp_path / "begun")
    exports.start(second)
    outcome = exports.finish(0.1)
    assert outcome is exports.outcomes[-1]
    assert [(o.checkpoint, o.exit_code) for o in exports.outcomes] == [(first, 130), (second, 130)]
    assert outcome.message == "not done after 0.1 s, not begun"


@pytest.mark.landing
def test_an_export_that_cannot_be_stopped_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in a system call, which no signal ends; the export before it went well."""
    exports = slow_exports(tmp_path)
    first, second = prefixes(tmp_path)[-2:]
    (tmp_path / "go").touch()
    exports.start(first)
    exports.finish(120)
    for left in ("begun", "go"):
        (tmp_path / left).unlink()
    monkeypatch.setattr("exporter.training.exports._STOP_SECONDS", 0.1)
    with monkeypatch.context() as signals:
        for name in ("terminate", "kill"):
            signals.setattr(subprocess.Popen, name, lambda process: None)
        exports.start(second)
        await_file(tmp_path / "begun")
        outcome = exports.finish(0.1)
    done, late = exports.outcomes
    assert done.is_done
    assert (done.checkpoint, done.message) == (first, "")
    assert outcome is late
    assert (late.checkpoint, late.exit_code) == (second, 130)
    assert late.message == "not done after 0.1 s, and it cannot be stopped"
    (tmp_path / "go").touch()
    exports.finish(120)


@pytest.mark.landing
def test_a_killed_export_is_told(tmp_path: Path) -> None:
    exports = slow_exports(tmp_path)
    exports.start(prefixes(tmp_path)[-1])
    await_file(tmp_path / "begun")
    assert exports._process is not None
    os.kill(exports._process.pid, 9)
    outcome = exports.finish(120)
    assert outcome is not None
    assert outcome.exit_code == -9


def test_an_export_that_cannot_begin_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that the trainer was started in is gone."""
    train(tmp_path / "train", [], steps=2)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    exports = Exports(request_of(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").rmdir()
    exports.start(prefixes(tmp_path)[-1])
    outcome = exports.finish(120)
    assert outcome is not None
    assert (outcome.exit_code, outcome.error) == (1, "FileNotFoundError")
    assert "gone" in outcome.message


# --- fit ---------------------------------------------------------------------------------------------------


@pytest.mark.landing
@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras 3", "tf-keras"])
def test_a_fit_is_exported_once_for_its_second_save(tmp_path: Path, kind: Any) -> None:
    class Looks(kind.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            started.append(bool(exports._thread or exports.outcomes))

    (tmp_path / "train").mkdir()
    saver = kind.callbacks.ModelCheckpoint(str(tmp_path / "train" / "cp-{epoch}.keras"))
    request = ExportRequest(tmp_path / "train", tmp_path / "model")
    callback = ExportCallback(request, every_checkpoints=2, raise_on_failure=True)
    exports, started = callback.schedule.exports, []
    model = kind.Sequential([kind.layers.InputLayer((3,)), kind.layers.Dense(2, name="out")])
    model.compile("sgd", "mse")
    callbacks = [saver, callback, Looks()]
    model.fit(np.ones((8, 3)), np.ones((8, 2)), epochs=2, verbose=0, callbacks=callbacks)
    assert started == [False, True]
    (outcome,) = callback.outcomes
    assert outcome.checkpoint.name == "cp-2.keras"
    x = np.random.default_rng(0).random((4, 3), np.float32)
    found = served(Path(outcome.document["path"]), x)
    np.testing.assert_allclose(found, model(x), atol=1e-6)
