"""A delta of another graph or vocabulary than its base's is refused, and a mere edit of the text is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.delta.delta_files import write_delta
from exporter.graph.graph_files import read_saved_model
from exporter.publish import delta_publication
from exporter.storage.files import FileDigests, file_digest
from tests.support.edited_jobs import BUILDER, LAYERS, Job, begun, refused

__all__ = ["begun"]


@pytest.fixture
def job(begun: Job, tmp_path: Path) -> Job:
    job = begun.copy(tmp_path)
    job.save(20)
    return job


def test_what_the_graph_is_made_of_is_noticed(job: Job) -> None:
    before = job.code.read_text()
    job.code.write_text(before.replace("* scale", "+ scale"))
    refused(job.export("--dry-run"), "model.py has changed")
    refused(job.export(), "model.py has changed")
    job.code.write_text(before)
    job.layers.write_text(LAYERS.replace("sigmoid", "tanh"))
    refused(job.export(), "layers.py has changed")
    job.layers.write_text(LAYERS)
    job.vocabulary.write_text("c\nb\na\n")
    refused(job.export(), "words.txt has changed")
    refused(job.export(model=None), "words.txt has changed")
    job.vocabulary.write_text("a\nb\nc\n")
    refused(job.export("--model-arg", "scale=2"), "--model-arg was None, is {'scale': '2'}")
    refused(job.export("--feed", "keep=1"), "--feed was None")
    done = job.export()
    assert done.code == 0, done.err
    assert done.document["position"] == 20
    assert done.document["graph"].startswith("of base 10")


def test_an_edit_that_means_nothing_is_no_difference(job: Job) -> None:
    text = job.code.read_text().replace('"""Scores."""', '"""Scores of words."""  # said better')
    job.code.write_text(text + "\nif __name__ == '__main__':\n    print(serving())\n")
    assert job.export().code == 0


def test_a_vocabulary_that_is_gone_is_not_known(job: Job) -> None:
    job.vocabulary.unlink()
    done = job.export()
    assert done.code == 0, done.err
    assert "not found: words.txt" in done.document["graph"]


def test_a_function_that_is_not_there_is_an_error_at_once(job: Job) -> None:
    ran = job.export(model="model.py:nonexistent")
    assert (ran.code, ran.error["error"]) == (1, "BuilderError")
    assert "its functions are: serving" in ran.error["cause"]
    refused(job.export(model="model.py:activate"), "the builder was serving, is activate")
    assert job.export(model="none.py:serving").error["error"] == "BuilderError"
    assert job.export(model="model.py").error["hint"].endswith("model.py:FUNCTION")


def test_outputs_of_a_delta_cannot_be_verified(job: Job) -> None:
    assert job.export("--verify", "outputs").code == 2


def test_the_bytes_of_a_delta_are_verified_before_it_is_published(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_on_a_bad_disk(prefix: Path, *args: object) -> None:
        write_delta(prefix, *args)  # type: ignore[arg-type]  # handed through
        (shard,) = prefix.parent.glob("delta.data-*")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(delta_publication, "write_delta", write_on_a_bad_disk)
        ran = job.export("--verify", "bytes")
    assert (ran.code, ran.error["error"]) == (6, "VerificationError")
    assert not [*job.directory.glob("model/deltas/*/*-*")]
    assert job.export("--verify", "bytes").document["position"] == 20


@pytest.mark.landing
def test_a_dry_run_shows_the_base_that_is_due(job: Job) -> None:
    """In a process of its own, since the builder is run."""
    job.vocabulary.write_text("c\nb\na\n")
    ran = job.program("--incr", "--new-base=if-needed", "--dry-run")
    assert ran.returncode == 0, ran.stderr
    assert "a new base is due" in ran.stderr
    assert "words.txt has changed" in ran.stderr
    assert "would write" in ran.stdout
    assert [path.name for path in job.directory.glob("model/[0-9]*")] == ["10"]


@pytest.mark.landing
def test_what_no_file_tells_is_found_by_building_the_graph_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the environment is in no file."""
    hidden = BUILDER.replace(
        "from layers import activate", "activate = getattr(tf, os.environ['ACTIVATION'])"
    )
    job.code.write_text(hidden)
    monkeypatch.setenv("ACTIVATION", "sigmoid")
    assert job.program("--incr", "--new-base=if-needed").returncode == 0
    job.save(30)
    same = job.program("--incr", "--verify=graph", "--json")
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["graph"] == "of base 20; built again, and the same"
    monkeypatch.setenv("ACTIVATION", "tanh")
    job.save(40)
    other = job.program("--incr", "--verify=graph", "--json")
    assert (other.returncode, json.loads(other.stderr.splitlines()[-1])["error"]) == (5, "SchemaChanged")
    assert "holds another inference graph" in other.stderr
    assert job.export("--verify=graph", "--watch").code == 2


def test_a_base_of_an_earlier_release_is_not_known(job: Job) -> None:
    manifest = job.directory / "model/10/manifest.json"
    document = json.loads(manifest.read_text())
    del document["incremental"]["graph"]
    manifest.write_text(json.dumps(document))
    job.code.write_text(BUILDER.replace("* scale", "+ scale"))
    done = job.export()
    assert done.code == 0, done.err
    assert done.document["graph"] == "of base 10; what it was made from is not known"
    assert job.export("--verify=graph").code == 2


def test_a_watch_with_nothing_to_publish_does_not_mind_an_edit(job: Job) -> None:
    assert job.export().code == 0
    job.code.write_text(BUILDER.replace("* scale", "+ scale"))
    assert job.export("--watch", "--until", "0.1s").code == 0
    refused(job.export(), "model.py has changed")
    job.save(30)
    refused(job.export("--watch", "--until", "0.1s"), "model.py has changed")


def test_a_file_that_looks_as_it_did_is_not_read_again(tmp_path: Path) -> None:
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return path.name

    digests, installed = FileDigests(), Path(json.__file__)
    for _ in range(2):
        assert digests(installed, digest) == installed.name
    kept = FileDigests.from_json(json.loads(json.dumps(digests.to_json())))
    assert kept(installed, digest) == installed.name
    assert read == [installed]
    fresh = tmp_path / "words.txt"
    for text in ("ab", "ba"):  # one size, and maybe one tick of the clock
        fresh.write_text(text)
        assert digests(fresh) == file_digest(fresh)


@pytest.mark.landing
def test_a_watch_makes_a_new_base_of_the_new_code(begun: Job, tmp_path: Path) -> None:
    """One process imports the builder's neighbour twice, as it was and as it is."""
    job = begun.copy(tmp_path)
    options = "--out fresh --model model.py:serving --incr --new-base if-needed --watch --until count=2"
    command = ["--ckpt-dir", "train", *options.split(), "--until", "250"]
    program = [sys.executable, "-m", "exporter", *command]
    with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (tmp_path / "fresh/10/manifest.json").exists() or process.poll() is not None)
        job.layers.write_text(LAYERS.replace("sigmoid", "tanh"))
        job.save(20)
        assert process.wait(300) == 0, process.stderr and process.stderr.read()
    assert "Tanh" not in operations(tmp_path / "fresh/10")
    assert "Tanh" in operations(tmp_path / "fresh/20")
    job.save(30)
    done = job.export("--out", tmp_path / "fresh")
    assert done.document["position"] == 30, done.err


def operations(bundle: Path) -> set[str]:
    (graph,) = read_saved_model(bundle).meta_graphs
    inside = [node for function in graph.graph_def.library.function for node in function.node_def]
    return {node.op for node in (*graph.graph_def.node, *inside)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
