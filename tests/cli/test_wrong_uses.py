"""What people type wrongly: each ends in a named error, and its hint is a command or a change that works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import typer

import exporter
from exporter.cli import app as export_cli
from exporter.errors import NotUpdatable, UsageError
from exporter.options import ExportRequest, Verify
from exporter.terminal import help
from serving import cli as serving_cli
from tests.support.commands import Ran, export_model, run_app

GOLDEN = Path(__file__).parents[1] / "golden/0.1.1"
EXPORT = "export-model --ckpt-dir train --out models/new"
AGENT = "serve-model agent --model-base-path models/ranker --target localhost --port 0"

WRONG = [
    # no such command, option or value
    ("export-model inpsect train", 2, "export-model inspect train"),
    ("export-model train models/new", 2, EXPORT),
    ("export-model update h:1 --model-name m", 2, "serve-model update h:1 --model-name m"),
    ("export-model run models/ranker", 2, "serve-model run models/ranker"),
    ("serve-model rollback models/ranker --to 20", 2, "export-model rollback models/ranker --to 20"),
    ("export-model train models/new m.py:serving --keep 3", 2, f"{EXPORT} --model m.py:serving --keep 3"),
    ("export-model --ckpt train --out models/new", 2, EXPORT),
    ("export-model --ckpt=train --out models/new", 2, "export-model --ckpt-dir=train --out models/new"),
    ("export-model --ckpt-dir --out models/new", 2, "export-model --ckpt-dir DIR --out models/new"),
    (f"{EXPORT} --hot-rows emb ids.npy", 2, f"{EXPORT} --hot-rows emb=ids.npy"),
    (f"{EXPORT} --hot-rows emb =ids.npy", 2, f"{EXPORT} --hot-rows emb=ids.npy"),
    (f"{EXPORT} --hot-rows emb= ids.npy", 2, f"{EXPORT} --hot-rows emb=ids.npy"),
    (f"{EXPORT} --hot-rows emb = ids.npy --keep 2", 2, f"{EXPORT} --hot-rows emb=ids.npy --keep 2"),
    (f"{EXPORT} --input user x:0 --output y z:0", 2, f"{EXPORT} --input user=x:0 --output y=z:0"),
    (
        f"{EXPORT} --keep 2 m.py:s",
        2,
        "export-model --model m.py:s --ckpt-dir train --out models/new --keep 2",
    ),
    (f"{EXPORT} --verify byte", 2, "--verify bytes"),
    (f"{EXPORT} --keep three", 2, "as in 3"),
    (f"{EXPORT} --keep", 2, "--keep N: Keep these versions, and remove others; repeatable: N, hourly=N"),
    (f"{EXPORT} --keep 0", 2, "as in --keep 1"),
    (f"{EXPORT} --watch --interval nan", 2, "as in 0.5"),
    ("serve-model status localhost --deadline inf", 2, "as in 0.5"),
    ("serve-model status localhost --deadline 1e12", 2, "at most 1000000000, which is 31 years"),
    (f"{EXPORT} --watch --interval 1e10", 2, "at most 1000000000, which is 31 years"),
    (f"{EXPORT} --watch --until 20000d", 2, "at most 1000000000, which is 31 years"),
    (f"{AGENT} --every refresh=20000d", 2, "at most 1000000000, which is 31 years"),
    (
        "serve-model run models/ranker --model_config_file_poll_wait_seconds=1e10",
        2,
        "at most 1000000000, which is 31 years",
    ),
    (f"{EXPORT} --incr --again", 2, "leave out --again"),
    (f"{EXPORT} --incr --despite deltas", 2, "leave out --despite deltas"),
    ("export-model --ckpt-dir train", 2, "export-model --ckpt-dir train --out MODEL --model WHAT"),
    ("export-model --out models/new", 2, "export-model --ckpt-dir DIR --out models/new --model WHAT"),
    ("export-model --out models/new inspect train", 2, "leave out --out: export-model inspect train"),
    (f"{EXPORT} --output models/new", 2, "as in --output x=models/new"),
    ("export-model help delta", 2, "export-model help deltas"),
    ("export-model inspect", 2, "export-model inspect PATH"),
    ("export-model history models/ranker 3", 2, "export-model history models/ranker"),
    ("export-model history models/ranker --last 0", 2, "--last N: Show only the newest N events."),
    # an option that has no effect without another
    (f"{EXPORT} --interval 2", 2, "add --watch, or leave out --interval"),
    (f"{EXPORT} --tolerance 0.1 --verify bytes", 2, "add --verify outputs, or leave out --tolerance"),
    (f"{EXPORT} --requests verify=requests", 2, "add --verify outputs, or leave out --requests verify"),
    (f"{EXPORT} --incr --grpc ca=system", 2, "add --notify HOST"),
    (
        f"{EXPORT} --notify localhost --delta-budget change=0.1",
        2,
        "add --incr, or leave out --notify and --delta-budget",
    ),
    ("export-model merge models/ranker --keep 2", 2, "add --rebase, or leave out --keep"),
    ("export-model merge models/ranker --despite hold", 2, "add --rebase, or leave out --despite"),
    ("export-model verify models/ranker --engine ray", 2, "add --bytes, or leave out --engine"),
    ("export-model doctor models/ranker --patience 2", 2, "add --target, or leave out --patience"),
    ("export-model doctor models/ranker --deadline 2", 2, "add --target, or leave out --deadline"),
    ("export-model doctor models/ranker --model-name m", 2, "add --target, or leave out --model-name"),
    (f"{AGENT} --pace max-delay=2", 2, "add --pace factor=N, or leave out --pace max-delay"),
    (f"{AGENT} --pace probe=2", 2, "add --pace factor=N, or leave out --pace probe"),
    (f"{AGENT} --canary-drift 2", 2, "add --canary, or leave out --canary-drift"),
    (f"{AGENT} --canary-seconds 2", 2, "add --canary, or leave out --canary-seconds"),
    # what is read
    ("export-model --ckpt-dir tran --out models/new", 3, "name what is there: train"),
    ("export-model --ckpt-dir empty --out models/new", 3, "--watch waits for its first checkpoint"),
    ("export-model --ckpt-dir note.txt --out models/new", 3, "name a directory of checkpoints"),
    ("export-model --ckpt-dir train/model.ckpt-21 --out models/new", 3, "train/model.ckpt-10"),
    ("export-model --ckpt-dir train/model.ckpt-32 --out models/new", 3, "train/model.ckpt-40"),
    ("export-model --ckpt-dir train/model.ckpt-20.index --out models/new", 3, "train/model.ckpt-10"),
    ("export-model --ckpt-dir archives --out models/new", 3, "written: archives/final.weights.h5"),
    ("export-model init archives", 3, "written: archives/final.weights.h5"),
    ("export-model diff train archives", 3, "written: archives/final.weights.h5"),
    ("export-model --ckpt-dir train --out http://x/y", 2, "publish to a local directory, then copy"),
    ("export-model push models/ranker /tmp/x", 2, "name a bucket and a model in it: s3://BUCKET/MODEL"),
    (
        "serve-model predict http://localhost:8501 --json-input m.py",
        2,
        "write localhost:8500: 8501 is",
    ),
    # before TensorFlow is imported, or the builder run
    (
        f"{EXPORT.replace('models/new', 'note.txt')} --model m.py:serving",
        1,
        "name a new directory in its place",
    ),
    (f"{EXPORT.replace('models/new', 'note.txt/m')} --model m.py:no", 1, "name a new directory in its place"),
    ("export-model --ckpt-dir pipe --out models/new", 3, "write it into a file, and name that"),
    ("export-model inspect pipe", 3, "write it into a file, and name that"),
    ("export-model --ckpt-dir https://x/y --out models/new", 2, "curl -L -o LOCAL https://x/y"),
    ("export-model --ckpt-dir models/ranker --out train", 3, "export-model inspect models/ranker"),
    ("export-model inspect nothere", 3, "name a directory of checkpoints"),
    ("export-model inspect m.py", 3, "--model m.py:FUNCTION"),
    ("export-model inspect models", 3, "export-model inspect models/deeprec"),
    # what is served
    (EXPORT, 2, "--model pkg.mod:fn"),
    (f"{EXPORT} --model m.py", 2, "--model m.py:FUNCTION"),
    (f"{EXPORT} --model m.py:servin", 1, "--model m.py:serving"),
    (f"{EXPORT} --model mm.py:serving", 1, "--model m.py:serving"),
    (f"{EXPORT} --model models/plain", 2, "--model models/plain/41"),
    (f"{EXPORT} --model models/plain/11", 2, "--model models/plain/41"),
    (f"{EXPORT} --model models/ranker/10", 2, "name what it was made from"),
    # what is published
    (
        "export-model --ckpt-dir train --out models --model m.py:serving",
        2,
        "as models/deeprec",
    ),
    (
        "export-model --ckpt-dir train --out models --model m.py:serving --incr",
        2,
        "as models/deeprec",
    ),
    ("export-model history nothere", 5, "--out nothere"),
    ("export-model history train", 5, "export-model inspect train"),
    ("export-model history models/ranker/10", 5, "models/ranker"),
    ("export-model verify models/rankr", 5, "did you mean models/ranker?"),
    (
        "export-model rollback --reason x models/ranker",
        2,
        "add --to POSITION; list the positions: export-model history models/ranker",
    ),
    ("export-model rollback models/ranker 30", 2, "export-model rollback models/ranker --to 30"),
    ("export-model rollback models/ranker --to 35", 5, "export-model history models/ranker"),
    ("export-model rollback models/ranker --to 83", 2, "export-model history models/ranker"),
    ("export-model rollback models/plain --to 35", 5, "export-model history models/plain"),
    ("export-model merge models/ranker --from 35", 5, "export-model history models/ranker"),
    (
        "export-model merge models/ranker --from 60 --to 20",
        2,
        "export-model merge models/ranker --from 20 --to 60",
    ),
    ("export-model merge models/ranker --rebase --to 20", 2, "export-model merge models/ranker --rebase"),
    ("export-model diff models/ranker", 2, "export-model diff models/ranker B"),
    ("export-model diff models/ranker@35 models/ranker", 5, "export-model history models/ranker"),
    ("export-model history models/ranker@prod", 5, "did you mean models/ranker?"),
    ("export-model history models/ranker/.@20", 5, "did you mean models/ranker?"),
    ("export-model tag models/ranker/99", 5, "did you mean models/ranker?"),
    ("export-model untag models/ranker prod", 2, "export-model tag models/ranker prod --delete"),
    ("export-model tag models/ranker prod=20", 2, "export-model tag models/ranker prod 20"),
    ("export-model tag models/ranker prod@latest", 2, "export-model tag models/ranker prod @latest"),
    ("export-model tag models/ranker 20", 2, "export-model tag models/ranker at-20 20"),
    ("export-model tag models/ranker @latest", 2, "export-model tag models/ranker at-latest @latest"),
    ("export-model rollback models/ranker@20", 2, "export-model rollback models/ranker --to 20"),
    ("export-model rollback models/ranker@prod", 2, "export-model rollback models/ranker --to prod"),
    ("export-model merge models/ranker --from 20 --to 20", 2, "export-model history models/ranker"),
    (
        "export-model export train --out models/new",
        2,
        "export-model --ckpt-dir train --out models/new",
    ),
    ("export-model --config x.toml inspect train", 2, "leave out --config: export-model inspect train"),
    (
        "export-model --dry-run merge models/ranker",
        2,
        "export-model merge models/ranker --dry-run",
    ),
    ("export-model --config once.toml", 2, "write [models.once]: with an s"),
    ("export-model --config once.toml#once", 2, "write [models.once]: with an s"),
    (f"{EXPORT} --model m.py:serving --for-server 3.9", 2, "as in --for-server 2.19"),
    (f"{EXPORT} --model m.py:serving --sign-key env:NOPE", 2, "--sign-key nope.key"),
    ("serve-model status nohost.invalid", 7, "getent hosts nohost.invalid"),
    ("serve-model status 127.0.0.1:8500:1", 2, "127.0.0.1:8500"),
    ("export-model tag models/rankr prod", 5, "did you mean models/ranker?"),
    ("export-model rollback models/ranker --to 2h", 2, "write @2h"),
    (f"{EXPORT} --map-tables --hot-rows emb=", 2, "as in --hot-rows emb=VALUE"),
    (f"{EXPORT} --map-tables --hot-rows =hot.npy", 2, "as in --hot-rows x=hot.npy"),
    ("export-model push s3://b/m models/ranker", 2, "export-model push models/ranker s3://b/m"),
    ("export-model pull models/ranker s3://b/m", 2, "export-model pull s3://b/m models/ranker"),
    ("export-model push models/rankr s3://b/m", 5, "did you mean models/ranker?"),
    ("export-model push models s3://b/m", 2, "as models/deeprec"),
    ("export-model push train s3://b/m", 5, "export-model inspect train"),
    ("export-model push nothere s3://b/m", 5, "--out nothere"),
    ("export-model push models/ranker b/m", 2, "write s3://b/m"),
    ("export-model pull models/ranker new", 2, "name a bucket and a model in it"),
    # servers
    ("serve-model models/ranker", 2, "serve-model run models/ranker"),
    ("serve-model models/ranker --port 8600", 2, "serve-model run models/ranker --port 8600"),
    ("serve-model rnu models/ranker", 2, "serve-model run models/ranker"),
    ("serve-model run models/ranker --prot 8600", 2, "serve-model run models/ranker --port 8600"),
    ("serve-model run models/ranker --wait x", 2, "--wait SECONDS"),
    ("serve-model run models", 2, "serve-model run models/deeprec"),
    ("serve-model run models/ranker/10", 2, "serve-model run models/ranker"),
    ("serve-model run models/ranker/10/manifest.json", 2, "serve-model run models/ranker"),
    ("serve-model run s3://b/m", 2, "export-model pull s3://b/m m"),
    ("serve-model status", 2, "serve-model status HOST:PORT"),
    ("serve-model status models/ranker", 2, "write 127.0.0.1:8500"),
    ("serve-model status 8600", 2, "write 127.0.0.1:8600"),
    ("serve-model status http://127.0.0.1:8500/v1", 2, "write 127.0.0.1:8500"),
    ("serve-model status 127.0.0.1:1", 7, "serve-model run MODEL --port 1"),
    (
        "serve-model status 127.0.0.1:1 --model-base-path models/ranker",
        7,
        "serve-model run models/ranker --port 1",
    ),
    ("serve-model predict 127.0.0.1:1 --json-input '{\"inputs\": 1}'", 2, "--json-input -"),
    (
        "serve-model agent --model-base-path models/ranker",
        2,
        "serve-model agent --model-base-path models/ranker --target HOST[:PORT]",
    ),
    ("serve-model agent models/ranker", 2, "serve-model agent --model-base-path models/ranker"),
    (
        "serve-model agent models/ranker localhost",
        2,
        "serve-model agent --model-base-path models/ranker --target localhost",
    ),
    (f"{AGENT} --once", 2, "see serve-model agent --help"),
    ("serve-model run trained", 2, "export-model init trained"),
    ("export-model doctor 127.0.0.1:8500", 5, "serve-model status 127.0.0.1:8500"),
    ("export-model history localhost:8500", 5, "serve-model status localhost:8500"),
    ("serve-model agent --model-base-path models --target a --port 0", 2, "/models/deeprec"),
    ("serve-model agent --model-base-path s3:/b/m --target a --port 0", 2, "export-model pull s3://b/m m"),
    ("serve-model agent --model-base-path m=models --target a --port 0", 2, "--model-base-path m=/"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a training, models of each kind, and things that are neither."""
    place = tmp_path_factory.mktemp("wrong")
    shutil.copytree(GOLDEN, place, dirs_exist_ok=True)
    (place / "empty").mkdir()
    (place / "note.txt").write_text("hi\n")
    os.mkfifo(place / "pipe")
    (place / "trained").mkdir()
    (place / "trained/checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    (place / "archives").mkdir()
    for age, name in enumerate(("final.weights.h5", "e-02.keras", "e-01.keras")):
        (place / "archives" / name).touch()
        os.utime(place / "archives" / name, (1e9 - age, 1e9 - age))
    (place / "once.toml").write_text("[model.once]\nout = 'm'\n")
    (place / "m.py").write_text("def serving():\n    pass\n")
    return place


def typed(line: str) -> Ran:
    program, *arguments = shlex.split(line)
    return export_model(*arguments) if program == "export-model" else run_app(serving_cli.app, *arguments)


@pytest.mark.parametrize(("line", "code", "hint"), WRONG, ids=[line for line, _, _ in WRONG])
def test_the_next_command_is_told(
    line: str, code: int, hint: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    ran = typed(line)
    assert (ran.code, ran.out) == (code, ""), ran.err
    (said,) = re.findall(r"^hint:  (.*)$", ran.err, re.MULTILINE)
    assert hint in said
    assert not re.search(r"error: unexpected|Traceback", ran.err)
    if said.startswith(("export-model ", "serve-model ")):
        assert said == hint, "a hint that is a command is the whole of it"


@pytest.mark.parametrize(
    "line",
    [
        "export-model tag models/ranker 20",
        "export-model tag models/ranker @latest",
        "export-model tag models/ranker other=20",
        "export-model rollback models/ranker@20",
        "export-model rollback models/ranker 20",
        "export-model --dry-run merge models/ranker",
        "export-model --config x.toml inspect train",
        "export-model merge models/ranker --from 20 --to 20",
        "export-model untag models/ranker prod",
        "export-model rollback models/ranker --to 35",
    ],
)
def test_what_a_hint_proposes_works_and_moves_no_tag(
    line: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "models", tmp_path / "models")
    shutil.copytree(place / "train", tmp_path / "train")
    monkeypatch.chdir(tmp_path)
    assert typed("export-model tag models/ranker prod 40").code == 0
    proposed = re.search(r"^hint: .*?(export-model [^;\n]*)", typed(line).err, re.MULTILINE)
    assert proposed is not None
    done = typed(proposed[1])
    assert done.code == 0, done.err
    tags = typed("export-model tag models/ranker --json").document["tags"]
    moved = [tag for tag in tags if tag["name"] == "prod" and tag["position"] != 40]
    assert not moved
    assert (len(tags) == 0) is ("untag" in line)


def test_a_hint_names_the_graph_and_the_place_of_this_very_call(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    words = ("--ckpt-dir", ranker, "--model", ranker_graph)
    ran = export_model(*words, "--out", tmp_path / "m", "--feed", "keep=1")
    assert f"export-model inspect {ranker_graph} --tensors" in ran.err
    assert "df /proc" in export_model(*words, "--out", "/proc/x").err
    model = GOLDEN / "models/ranker"
    assert "getent hosts nohost.invalid" in export_model("doctor", model, "--target", "nohost.invalid").err


def test_errors_of_the_python_api_name_its_arguments(place: Path) -> None:
    model = place / "models/ranker"
    with pytest.raises(UsageError, match=r"^keep=0 would leave no version"):
        exporter.rebase(model, keep=0, dry_run=True)
    with pytest.raises(UsageError, match=r"^position 20 does not come before position 20") as same:
        exporter.merge(model, 20, 20)
    assert same.value.hint.endswith(f"export-model history {model}")
    with pytest.raises(UsageError, match=r"^for_server=3.9: there is no TensorFlow 3") as newer:
        exporter.export(place / "train", place / "new", for_server="3.9")
    assert "as in for_server=2.19" in newer.value.hint
    with pytest.raises(UsageError, match=r"^nothing says what to serve") as unsaid:
        exporter.export(place / "train", place / "new")
    assert ': model="pkg.mod:fn"; or begin a builder: export-model init' in unsaid.value.hint
    with pytest.raises(NotUpdatable) as nowhere:
        exporter.history(place / "new")
    assert f"--out {place / 'new'} --model WHAT" in nowhere.value.hint


def test_a_version_that_is_not_there_is_no_matter_of_a_hold(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "models/plain", "plain")
    asked = "export-model rollback plain --to 35"
    assert "export-model resume plain --lift-only" in typed(asked).err
    Path("plain/hold").unlink()
    said = typed(asked).err
    assert ("export-model history plain" in said, "--lift-only" in said) == (True, False)


def test_each_program_knows_the_commands_of_the_other() -> None:
    for name, app in (("export-model", export_cli.app), ("serve-model", serving_cli.app)):
        commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - of a group alone
        shown = {each for each, command in commands.items() if not command.hidden}
        assert shown - {"help"} == help._COMMANDS[name]


def test_a_hint_knows_its_program(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    ran = typed("serve-model reload 127.0.0.1:1 --only --model-name a --model-base-path /b --label c=d")
    assert "hint:  see serve-model reload --help" in ran.err


def test_rest_without_its_libraries_is_refused_before_anything_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "h11", None)
    ran = typed("serve-model run models/ranker --port 0 --rest-api-port 0")
    assert (ran.code, "--rest-api-port needs h11" in ran.err) == (2, True), ran.err
    assert "pip install '.[server]'" in ran.err


def test_a_request_from_python_is_judged_by_what_it_holds() -> None:
    with pytest.raises(UsageError, match=r"^--tolerance goes with --verify outputs"):
        ExportRequest(Path("train"), Path("model"), tolerance=0.1)
    request = ExportRequest(Path("train"), Path("model"), tolerance=0.1, verify=Verify.OUTPUTS)
    assert request.tolerance == 0.1
    ExportRequest(Path("train"), Path("model"), min_change=0.1)  # `export_incremental` is no option


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["--object-path", "net"], "holds no objects", "leave out --object-path"),
        (["--by-order"], "the checkpoint's arrays have names", "leave out --by-order"),
        (
            ["--partition-strategy", "ranker/user_embeddin=mod"],
            "no served variable is called so",
            "or name a variable: ranker/user_embedding, for example",
        ),
        (
            ["--rename", "user_embedding=x"],
            "no served variable is called so",
            "or name a variable: ranker/user_embedding, for example",
        ),
    ],
)
def test_what_no_variable_is_matched_by(
    ranker: Path, ranker_graph: Path, tmp_path: Path, arguments: list[str], said: str, hint: str
) -> None:
    places = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m"]
    ran = export_model(*places, *arguments)
    assert (ran.code, arguments[0] in ran.err, said in ran.err) == (2, True, True), ran.err
    assert hint in ran.err
    assert not (tmp_path / "m").exists()
