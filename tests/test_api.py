"""The Python API as it is used: names, help, types, strings for paths and enums, and errors of wrong uses."""

from __future__ import annotations

import importlib
import inspect
import os
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

import exporter
from exporter import DataMode, ExportRequest, Jobs, StopWhen, Updates, Verify, Watching, export
from exporter.errors import ExportError, ExportWarning, NothingChanged, UsageError
from exporter.options import Isolation, declared, meanings
from exporter.pipeline.inspected import Inspection, ModelView
from exporter.training import ExportHook, IncrementCallback, IncrementHook, StopAfterHook
from tests.support.directory_store import BUCKET, reached
from tests.support.graph_runs import train
from tests.support.step_models import MODEL, save, versions

PROMISED = {
    "exporter": """Catalog DataMode DeltaDtype ExportError ExportRequest ExportWarning Exported ExportedDelta
        Jobs Plan Role Signing StopWhen Trusting Updates Verify Watching diff doctor execute export
        export_incremental history inspect is_chief merge node_role open_checkpoint opened plan pull push
        rebase resume rollback tag tags untag verify_model watch""",
    "exporter.tables": """DynamicTable TrainableTable dynamic_embedding trainable_embedding
        trainable_embedding_class""",
    "exporter.training": """ExportCallback ExportHook ExportOutcome IncrementCallback IncrementHook
        IncrementWriter LoadReport MonitoredTrainingSession StopAfterCallback StopAfterHook checkpoint_dir
        is_chief load_checkpoint restore_increments""",
}
"""What releases exported; a name leaves it as docs/compatibility.md says."""


@pytest.mark.parametrize("module", PROMISED)
def test_names_that_a_release_had_stay(module: str) -> None:
    assert importlib.import_module(module).__all__ == PROMISED[module].split()


@pytest.mark.parametrize("name", exporter.__all__)
def test_each_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(exporter, name).__doc__


def test_type_checkers_see_the_same_names() -> None:
    source = Path(exporter.__file__).read_text()
    assert sorted(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE)) == exporter.__all__
    assert (Path(exporter.__file__).parent / "py.typed").exists()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        exporter.nothing_of_the_kind  # noqa: B018 - the access is the test


def test_a_traceback_shows_cause_and_hint(tmp_path: Path) -> None:
    code = f"import exporter; exporter.history({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    *_, message, hint = done.stderr.strip().splitlines()
    if sys.version_info >= (3, 11):
        assert f"nothing is published under {tmp_path}" in message
        assert hint.startswith("hint:  publish a base: ")
    error = ExportError("a", cause="b", hint="c")
    error.hint = "d"
    assert error.__notes__ == ["cause: b", "hint:  d"]


def test_one_server_may_be_named_by_a_string(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden/0.1.1/models/plain"
    shutil.copytree(golden, tmp_path / "m")
    found = exporter.doctor(tmp_path / "m", targets="127.0.0.1:1", patience=0.1, deadline=1)
    assert [one.address for one in found.servers] == ["127.0.0.1:1"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, exporter; print(len({'numpy', 'click', 'msgspec', 'tensorflow'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "0"


def test_an_error_inside_a_call_that_fits_stays_what_it_is() -> None:
    class Nowhere(os.PathLike[str]):
        def __fspath__(self) -> str:
            raise TypeError("of this path's own")

    with pytest.raises(TypeError, match="of this path's own"):
        exporter.inspect(Nowhere())


def test_dir_lists_the_api_and_a_near_name_is_proposed() -> None:
    import exporter.training

    assert set(exporter.__all__) < {*dir(exporter)} < {*exporter.__all__, "__version__"} | {"__doc__"}
    assert dir(exporter.training) == exporter.training.__all__
    code = "import exporter\nexporter.exprot"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "no attribute 'exprot'" in done.stderr
    if sys.version_info >= (3, 12):
        assert "Did you mean: 'export'" in done.stderr


@pytest.mark.landing
def test_type_checkers_know_every_argument() -> None:
    """A script of uses passes, and each of its mistakes is found: without its `type: ignore` it fails."""
    script = Path(__file__).parent / "support" / "typed_uses.py"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=script.parent.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["export", "export_incremental", "plan", "watch", "ExportRequest"])
def test_help_and_completion_have_every_option(name: str) -> None:
    function = getattr(exporter, name)
    text, named = inspect.getdoc(function) or "", inspect.signature(function).parameters
    for option, meaning in meanings(ExportRequest).items():
        if option == "model":  # which functions have as a parameter, and tell of above
            continue
        assert re.search(rf"^ +{option}: (.* = .*\n +)?{re.escape(meaning)}$", text, re.MULTILINE)
        assert option in named
    assert "options" not in named
    assert {one.path[0] for one in declared(ExportRequest)} - {"model"} <= {*meanings(ExportRequest)}


def test_help_speaks_python() -> None:
    text = inspect.getdoc(export) or ""
    assert "inputs: Mapping[str, str | float] = {}\n" in text
    assert "verify: Verify | Literal['none', 'files', 'bytes', 'outputs'] = 'files'" in text
    assert "Repeatable" not in text
    assert "--" not in text
    assert "factory" not in str(inspect.signature(export))


@pytest.mark.parametrize("module", ["exporter", "exporter.training", "serving", "serving.client"])
def test_help_can_be_asked_of_each_name_and_of_all(module: str) -> None:
    there = importlib.import_module(module)
    assert pydoc.render_doc(there)
    for name in getattr(there, "__all__", []):
        assert pydoc.render_doc(getattr(there, name))


@pytest.mark.parametrize("module", ["exporter", "exporter.tables", "exporter.training"])
def test_help_of_a_package_is_its_names_and_nothing_that_they_inherit(module: str) -> None:
    code = f"import {module} as package; help(package)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = done.stdout.partition("PACKAGE CONTENTS")[0].splitlines()
    assert 20 < len(lines) < 200
    assert not re.search("__[a-z]|inherited|<[a-z]+[ .]|<factory", "".join(lines))
    package = importlib.import_module(module)
    assert {*package.__all__} <= {*dir(package)}
    for name in package.__all__:
        (first, *_) = (inspect.getdoc(getattr(package, name)) or "").splitlines()
        at = next(number for number, line in enumerate(lines) if re.match(rf" +(class )?{name}\b", line))
        assert any(line.strip() == first for line in lines[at : at + 15]), name


def test_help_of_a_function_shows_defaults_that_can_be_read() -> None:
    for name in exporter.__all__:
        assert " at 0x" not in pydoc.render_doc(getattr(exporter, name)), name
    assert "progress=no_progress" in (exporter.__doc__ or "")
    for kind in (Watching, ExportRequest):
        assert not re.search(r"__eq__|Annotated\[|Option\(", pydoc.render_doc(kind))


@pytest.mark.parametrize("view", get_args(Inspection))
def test_help_can_be_asked_of_what_inspect_returns(view: type) -> None:
    assert pydoc.render_doc(view)


def test_no_help_holds_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import exporter, exporter.training.roles as roles; [help(x) for x in (exporter.is_chief, roles)]"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MY_SECRET": "s3cr3t-value"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "is_chief" in done.stdout
    assert "s3cr3t-value" not in done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    save(Path("train"), 10)
    return tmp_path


def test_strings_do_what_paths_and_enums_do(here: Path) -> None:
    given = ExportRequest("train", f"file://{here}/m", "model.py:build", data="copy", verify="bytes", keep=2)
    assert given == ExportRequest(
        Path("train"),
        here / "m",
        model="model.py:build",
        data=DataMode.COPY,
        verify=Verify.BYTES,
        keep=2,
    )
    several = ExportRequest(
        "train", "m", model_args={"depth": 3, "on": True}, renames=["a=b"], casts="bfloat16"
    )
    assert several.model_args == {"depth": "3", "on": "True"}
    assert (several.renames, several.casts) == (("a=b",), ("bfloat16",))
    assert ExportRequest("train", "m", model=Path("models/m/3")).model == "models/m/3"
    assert Updates(isolation="row").isolation is Isolation.ROW
    assert repr(given) == (
        f"ExportRequest(ckpt_dir={Path('train')!r}, out={here / 'm'!r}, model='model.py:build', "
        f"data={DataMode.COPY!r}, keep=2, verify={Verify.BYTES!r})"
    )


def test_a_retried_export_publishes_once(here: Path) -> None:
    first = export("train", "models/m", model="model.py:build")
    second = export("train", "models/m", model="model.py:build")
    assert (first.is_new, second.is_new) == (True, False)
    assert second.published.path == first.published.path == Path("models/m/10")
    assert second.published.manifest == first.published.manifest
    assert second.variables.bytes_copied == 0
    assert repr(second) == "Exported('models/m/10', step=10, is_new=False)"
    third = export(ExportRequest("train", "models/m", model="model.py:build", again=True))
    assert (third.is_new, versions(Path("models/m"))) == (True, [11, 10])


def test_bases_deltas_and_maintenance_by_strings(here: Path) -> None:
    asked: Any = {"model": "model.py:build", "updates": Updates()}
    base = export("train", "models/m", **asked)
    save(Path("train"), 20)
    delta = export("train", "models/m", save_incr_model=True)
    assert repr(base.published) == "PublishedVersion('models/m/10', position=10)"
    assert repr(base.published.manifest) == "Manifest(position=10, step=10, tensors=1)"
    assert re.fullmatch(r"PublishedDelta\('models/m/deltas/.*', position=20\)", repr(delta.published))
    assert re.fullmatch(r"ExportedDelta\('models/m/deltas/.*', position=20, rows=6\)", repr(delta))
    with pytest.raises(NothingChanged):
        export("train", "models/m", save_incr_model=True)
    nothing = exporter.export_incremental("train", "models/m")
    assert isinstance(nothing, exporter.ExportedDelta)
    assert (nothing.published, base.is_new) == (None, True)
    for act in (
        lambda **how: exporter.rollback("models/m", 10, reason="scores fell", **how),
        lambda **how: exporter.resume("models/m", **how),
        lambda **how: exporter.merge("models/m", **how),
        lambda **how: exporter.rebase("models/m", keep=1, **how),
    ):
        planned, before = act(dry_run=True), {*Path("models").rglob("*")}
        assert (planned.published, before) == (None, {*Path("models").rglob("*")})
        done = act()
        assert replace(done, published=None) == planned
        assert done.published.path == planned.path
    assert exporter.history("models/m").hold is None
    assert exporter.verify_model("models/m").problems == ()
    with pytest.raises(UsageError, match="--engine goes with bytes"):
        exporter.verify_model("models/m", jobs=Jobs(engine="ray"))
    assert exporter.open_checkpoint("train").step == 20
    assert len(repr(exporter.open_checkpoint("train"))) < 200
    assert repr(exporter.inspect("train")).startswith("CheckpointView(Catalog('train/")
    assert repr(exporter.open_checkpoint("train")).endswith("in 1 file)")
    with exporter.opened("models/m") as model:
        assert repr(model) == "LocalModel('models/m')"
    assert isinstance(exporter.inspect("models/m"), ModelView)


def test_a_watch_and_a_plan_by_strings(here: Path) -> None:
    once = Watching(0.05, StopWhen(count=1))
    (done,) = exporter.watch("train", "models/m", "model.py:build", watching=once)
    assert done.published.path == Path("models/m/10")
    planned = exporter.plan("train", "models/other", "model.py:build")
    assert len(repr(planned)) < 200
    assert exporter.execute(planned).published.path == Path("models/other/10")


def test_a_hint_is_of_the_function_that_was_called(here: Path) -> None:
    asked: Any = {"interval": 5}
    with pytest.raises(exporter.ExportError) as caught:
        next(iter(exporter.watch("train", "models/m", "model.py:build", **asked)))
    assert caught.value.hint == "watch(..., watching=Watching(interval_seconds=5))"
    asked = {"zzz": 5}
    with pytest.raises(exporter.ExportError) as caught:
        next(iter(exporter.watch("train", "models/m", "model.py:build", **asked)))
    assert caught.value.hint == "help(exporter.watch) lists them"
    asked = {"keep": "3"}
    with pytest.raises(exporter.ExportError) as caught:
        export("train", "models/m", "model.py:build", **asked)
    assert caught.value.hint == "keep=3", "what was meant"


def test_signatures_do_not_hold_how_options_are_declared() -> None:
    assert "Euclidean" not in str(inspect.signature(ExportRequest)), "each is a line of the docstring"


def test_a_function_is_the_builder_itself(here: Path) -> None:
    scope: dict[str, Any] = {}
    exec(MODEL, scope)  # as a notebook defines it
    done = export("train", "models/m", scope["build"], verify="outputs")
    assert done.published.path == Path("models/m/10")


def test_models_in_stores_by_their_urls(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/m"
    with reached(here / "store", monkeypatch):
        first = export("train", url, model="model.py:build", updates=Updates())
        assert first.is_new
        assert not export(ExportRequest("train", url, model="model.py:build", updates=Updates())).is_new
        save(Path("train"), 20)
        assert export("train", url, save_incr_model=True).at.position == 20
        assert exporter.verify_model(url).problems == ()
        assert isinstance(exporter.inspect(url), ModelView)
        assert not Path("s3:").exists()
        with pytest.raises(UsageError, match="only local paths"):
            exporter.plan("train", url, model="model.py:build")


WRONG: dict[str, tuple[Callable[[], object], str, str]] = {
    "an enum's name": (
        lambda: export("train", "m", data=_any("compct")),
        "data='compct': expected 'auto', 'link', 'copy' or 'compact'",
        'did you mean data="compact"?',
    ),
    "an enum in capitals": (
        lambda: export("train", "m", verify=_any("OUTPUTS")),
        "verify='OUTPUTS': expected",
        'verify="outputs"',
    ),
    "a flag for an enum": (lambda: export("train", "m", verify=_any(True)), "verify=True: expected", ""),
    "a number for a path": (lambda: export(_any(3), "m"), "ckpt_dir=3: expected a path", "ckpt_dir="),
    "bytes for a path": (lambda: export(_any(b"train"), "m"), "expected a path", "ckpt_dir="),
    "a list for a path": (lambda: export(_any(["train"]), "m"), "expected a path", "ckpt_dir="),
    "an empty path": (lambda: export("", "m"), "ckpt_dir is empty", 'ckpt_dir="."'),
    "no model to publish": (lambda: export(_any("train")), "needs two places", 'export("train"'),
    "a dict for a request": (lambda: export(_any({"out": "m"})), "needs two places", 'export("train"'),
    "no model": (lambda: export("train", "m"), "nothing says what to serve", "model="),
    "a tuple for a model": (lambda: export("train", "m", _any(("a", "b"))), "a Keras model", "model="),
    "a model's typo": (lambda: export("train", "m", "modle.py:build"), "no file modle.py", "model.py:build"),
    "a function's typo": (lambda: export("train", "m", "model.py:biuld"), "'biuld'", "model.py:build"),
    "an argument's typo": (
        lambda: _any(export)("train", "m", modle="model.py:build"),
        "export has no argument 'modle'",
        "did you mean model?",
    ),
    "an argument of the command": (
        lambda: _any(export)("train", "m", updatable=True),
        "no argument 'updatable'",
        "updates=Updates()",
    ),
    "another of the command": (
        lambda: _any(export)("train", "m", incr=True),
        "no argument 'incr'",
        "save_incr_model=True",
    ),
    "a third of the command": (lambda: _any(export)("train", "m", dry_run=True), "'dry_run'", "plan("),
    "nothing": (lambda: _any(export)(), "export needs ckpt_dir", "export(ckpt_dir, out, model, "),
    "no position": (lambda: _any(exporter.rollback)("m"), "rollback needs to", "rollback(model, to, "),
    "no model to roll back": (
        lambda: _any(exporter.rollback)(to=3),
        "rollback needs model",
        "rollback(model, to, ",
    ),
    "a reason's typo": (
        lambda: _any(exporter.rollback)("m", 3, resaon="scores fell"),
        "rollback has no argument 'resaon'",
        "did you mean reason?",
    ),
    "an argument of nothing": (
        lambda: _any(Watching)(foo=1),
        "Watching has no argument 'foo'",
        "it takes interval_seconds, stop",
    ),
    "too many places": (
        lambda: _any(exporter.rollback)("m", 3, "scores fell"),
        "takes 2 arguments by place, and 3 are given",
        "reason",
    ),
    "a position twice": (lambda: _any(exporter.rollback)("m", 3, to=4), "is given to twice", "rollback("),
    "half a request": (lambda: _any(ExportRequest)("train"), "ExportRequest needs out", "ckpt_dir, out"),
    "options beside a request": (
        lambda: _any(export)(ExportRequest("train", "m"), keep=3),
        "a request has all options",
        "replace(request, keep=...)",
    ),
    "a request that was changed": (
        lambda: export(replace(ExportRequest("train", "m"), keep=_any("3"))),
        "keep='3': expected a whole",
        "",
    ),
    "a text for a number": (lambda: export("train", "m", keep=_any("3")), "keep='3': expected a whole", ""),
    "more digits than Python reads": (
        lambda: export("train", "m", keep=_any("9" * 5000)),
        "expected a whole number",
        "",
    ),
    "a fraction": (lambda: export("train", "m", keep=_any(1.5)), "keep=1.5: expected a whole number", ""),
    "a flag for a number": (lambda: export("train", "m", keep=_any(True)), "keep=True", ""),
    "a number too small": (lambda: export("train", "m", keep=0), "keep=0: expected 1 or more", ""),
    "no distance": (lambda: export("train", "m", min_change=float("nan")), "min_change=nan", ""),
    "a text for a fraction": (lambda: export("train", "m", tolerance=_any("1e-3")), "tolerance='1e-3'", ""),
    "a flag for deltas": (
        lambda: export("train", "m", updates=_any(True)),
        "updates=True: expected exporter.Updates(...)",
        "updates=Updates()",
    ),
    "an engine for jobs": (lambda: export("train", "m", jobs=_any("ray")), "exporter.Jobs", "jobs=Jobs()"),
    "no engine": (lambda: Jobs(engine=_any("rey")), "engine='rey'", 'engine="ray"'),
    "fewer than no workers": (lambda: Jobs(workers=-1), "workers=-1: expected 0 or more", ""),
    "a list of arguments": (lambda: export("train", "m", model_args=_any(["a=b"])), "expected a dict", ""),
    "a list as argument": (lambda: export("train", "m", model_args=_any({"a": [1]})), "model_args['a']", ""),
    "a dict of renames": (lambda: export("train", "m", renames=_any({"a": "b"})), "expected a list", ""),
    "a version's name": (
        lambda: export("train", "m", "model.py:build", version="v1"),
        "'v1'",
        "leave it out",
    ),
    "half a version": (lambda: export("train", "m", version=_any(1.5)), "version=1.5", ""),
    "a text for a flag": (
        lambda: _any(export)("train", "m", save_incr_model="yes"),
        "save_incr_model='yes': expected True or False",
        "",
    ),
    "no bar": (lambda: export("train", "m", progress=_any(True)), "progress=True", "leave progress= out"),
    "how often to watch": (lambda: exporter.watch("train", "m", watching=_any(3)), "watching=3", "Watching("),
    "when to stop": (lambda: Watching(stop=_any(3)), "stop=3: expected exporter.StopWhen", "StopWhen()"),
    "a duration": (lambda: StopWhen(after_seconds=_any("2h")), "after_seconds='2h': expected a number", ""),
    "a request for a plan": (
        lambda: exporter.execute(_any(ExportRequest("train", "m"))),
        "what plan(...) returns",
        "execute(plan(...))",
    ),
    "a fraction for a position": (
        lambda: exporter.rollback("models/m", _any(10.5)),
        "to=10.5: expected a position",
        "export-model history models/m",
    ),
    "a number for a model": (lambda: exporter.resume(_any(3)), "model=3: expected a path", "model="),
    "nothing to inspect": (lambda: exporter.inspect(_any(None)), "path=None: expected a path", "path="),
    "a checkpoint's typo": (lambda: exporter.open_checkpoint("trian"), "there is no trian", "train"),
    "another store": (
        lambda: export("hdfs://n/train", "m"),
        "only local paths, s3://, gs:// and az://",
        "hdfs dfs -get",
    ),
    "exports without a model": (lambda: ExportHook(_any("train")), "expected an ExportRequest", "--ckpt-dir"),
    "exports of a function": (
        lambda: ExportHook(ExportRequest("train", "m", lambda: 0)),
        "found a function",
        'model="my_model.py:serving"',
    ),
    "exports now and then": (
        lambda: ExportHook(ExportRequest("train", "m"), every_checkpoints=_any("3")),
        "every_checkpoints='3'",
        "every_checkpoints=1",
    ),
    "increments nowhere": (lambda: IncrementHook(_any(3), 1), "ckpt_dir=3: expected a path", "ckpt_dir="),
    "increments in a store": (lambda: IncrementHook("s3://b/t", 1), "only local paths", "out=URL"),
    "increments at a text": (lambda: IncrementHook("train", _any("10")), "expected a number", "secs=60"),
    "a directory for a manager": (
        lambda: IncrementCallback("train", 1),
        "manager='train': expected a tf.train.CheckpointManager",
        "CheckpointManager(",
    ),
    "a variable's name": (lambda: exporter.is_chief(_any("TF_CONFIG")), "environ='TF_CONFIG'", "is_chief()"),
    "an end at no number": (lambda: StopAfterHook(float("nan")), "seconds=nan", "StopAfterHook(3600)"),
    "an end at a text": (lambda: StopAfterHook(_any("5")), "seconds='5'", "StopAfterHook(3600)"),
}


def _any(value: Any) -> Any:
    """What a type checker would refuse."""
    return value


@pytest.mark.parametrize("case", WRONG, ids=[name.replace(" ", "-") for name in WRONG])
def test_a_wrong_use_is_a_named_error_with_what_to_write(case: str, here: Path) -> None:
    use, found, hint = WRONG[case]
    with pytest.raises(ExportError) as caught:
        use()
    assert found in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.hint
    assert {path.name for path in here.iterdir()} <= {"model.py", "train", "__pycache__"}, (
        "nothing is written"
    )


# --- notes -------------------------------------------------------------------------------------------------


def dropping(v1: Any) -> None:
    import tensorflow as tf

    x = v1.placeholder(tf.float32, [None, 2], name="x")
    tf.matmul(v1.nn.dropout(x, rate=0.25), v1.get_variable("w", [2, 1]), name="y")


def test_notes_are_warnings_in_the_callers_line(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    train(tmp_path / "train", dropping)
    options: dict[str, Any] = {"inputs": {"x": "x"}, "outputs": {"y": "y"}, "allow": ["dropout"]}
    request = ExportRequest(tmp_path / "train", tmp_path / "watched", **options)
    exports: dict[str, Callable[[], Any]] = {
        "export": lambda: export(tmp_path / "train", tmp_path / "exported", **options),
        "execute": lambda: exporter.execute(exporter.plan(replace(request, out=tmp_path / "planned"))),
        "base": lambda: exporter.export_incremental(tmp_path / "train", tmp_path / "base", **options),
        "watch": lambda: [*exporter.watch(request, watching=Watching(stop=StopWhen(count=1)))],
    }
    for name, call in exports.items():
        with pytest.warns(ExportWarning, match=r"drops a random 0\.25") as told:
            call()
        assert {Path(each.filename) for each in told} == {Path(__file__)}, name


# --- what is published -------------------------------------------------------------------------------------


def test_a_published_model_is_read_compared_and_carried(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    export("train", "m", model="model.py:build")
    save(Path("train"), 20)
    export("train", "m", model="model.py:build")
    first, second = exporter.history("m").publications
    assert (first.step, second.step) == (10, 20)
    assert str(exporter.history(Path("m"))) == "Model('m', publications: 2, at=20 (step 20))"
    seen = exporter.doctor("m", ckpt_dir="train", targets=["127.0.0.1:1"], deadline=0.5)
    assert [finding.code.value for finding in seen.findings if finding.level.value == "wrong"] == ["down"]
    assert (seen.is_well, exporter.doctor("m", ckpt_dir="train").is_well) == (False, True)
    found = exporter.diff(f"m/{first.position}", Path("m") / str(second.position))
    assert not found.is_empty
    assert exporter.diff("train", f"m/{second.position}").only_a == ("global_step",), "it is not served"
    with reached(tmp_path_factory.mktemp("store"), monkeypatch):
        url = f"s3://{BUCKET}/ranker"
        assert len(exporter.push("m", url, dry_run=True).upload) == 2
        assert len(exporter.push("m", url).upload) == 2
        assert not exporter.push("m", url).upload, "nothing is new"
        assert len(exporter.pull(url, "copy").fetched) == 2
        assert exporter.diff(url, "copy").is_empty
        assert [event.step for event in exporter.history(url).publications] == [10, 20]


def test_models_and_urls_in_the_wrong_places_are_named(here: Path) -> None:
    for call in (
        lambda: exporter.push("s3://b/m", "s3://c/m"),
        lambda: exporter.pull("s3://b/m", "s3://c/m"),
    ):
        with pytest.raises(UsageError, match="model"):
            call()
    with pytest.raises(ExportError):
        exporter.history("train")
    with pytest.raises(UsageError, match="MODEL@POSITION"):
        exporter.diff("m@x", "train")
