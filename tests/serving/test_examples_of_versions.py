"""`predict --example --model-base-path`: requests of what a version knows are answered by trained rows."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.bundle import mapped_tables
from exporter.errors import ExportError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.saved_model import choose_graph
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.publish.served import VersionState
from exporter.publish.version_examples import example_of
from exporter.publish.versions import VersionDir, version_dirs
from exporter.storage.layout import WARMUP_FILE
from exporter.tables import DynamicTable
from exporter.wire import protos
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import fill
from serving.cli import app
from serving.example import example
from serving.server import ModelServer
from tests.support.commands import Ran, run_app
from tests.support.deeprec import Ev, write_full
from tests.support.foreign_models import Tables, vocabulary
from tests.support.serving_models import write_saved_model, write_warmup

WORDS = ["[UNK]", "red", "blue", "green"]
TAGS = ["two words", "new", "old"]
USERS = np.array([0, 2**40 + 7, -5, 11, 2**62], np.int64)
UNTRAINED = 9.5
ROWS = {"of_words": 5, "of_tags": 4, "of_rows": 3}


def model(vocabulary_file: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Every kind of input; each output says of a row whether it is trained: `UNTRAINED` if not."""
    import tensorflow as tf

    v1, lookup = tf.compat.v1, tf.lookup
    word, tags = v1.placeholder(tf.string, [None], "word"), v1.placeholder(tf.string, [None, 2], "tags")
    row, user = v1.placeholder(tf.int32, [None], "row"), v1.placeholder(tf.int64, [None], "user")
    age, hashed = v1.placeholder(tf.float32, [None], "age"), v1.placeholder(tf.string, [None], "hashed")
    of_words, of_tags, of_rows = (
        v1.get_variable(name, [rows, 2], use_resource=True) for name, rows in ROWS.items()
    )
    index = lookup.TextFileIndex
    lines = lookup.TextFileInitializer(
        str(vocabulary_file), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
    )
    listed = lookup.KeyValueTensorInitializer(TAGS, tf.range(3, dtype=tf.int64))
    words = lookup.StaticHashTable(lines, 4).lookup(word)
    split = tf.strings.split(tf.strings.lower(tf.reshape(tags, [-1]))).values
    tagged = lookup.StaticHashTable(listed, 3).lookup(split)
    outputs = {
        "word_rows": tf.gather(of_words, words),
        "tag_rows": tf.reshape(tf.gather(of_tags, tagged), [tf.shape(tags)[0], -1]),
        "row_rows": tf.nn.embedding_lookup(of_rows, row),
        "user_rows": DynamicTable("user", 2, default=[[UNTRAINED] * 2]).lookup(user),
        "older": age * 2.0,
        "hashed_rows": tf.gather(of_rows, tf.strings.to_hash_bucket_fast(hashed, 3)),
    }
    return {each.op.name: each for each in (word, tags, row, user, age, hashed)}, outputs


def publish(directory: Path, **options: Any) -> Path:
    """A version of `model` under `directory`/served."""
    file = directory / "words.txt"
    file.write_text("\n".join(WORDS))
    dense = {name: np.ones((count, 2), np.float32) for name, count in ROWS.items()}
    dense["of_words"][4] = dense["of_tags"][3] = UNTRAINED
    tables = {"user": Ev(USERS, np.ones((len(USERS), 2), np.float32))}
    prefix = write_full(directory / "train/model.ckpt-7", tables, dense=dense, step=7)
    (prefix.parent / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
    done = export(ExportRequest(prefix.parent, directory / "served", model=lambda: model(file), **options))
    return done.published.path.parent


@contextmanager
def serving(base: Path) -> Iterator[Callable[..., Ran]]:
    """Calls of `serve-model predict` on a server of a model."""
    with ModelServer(base, name="ranker") as server:
        server.wait_available(60)
        yield lambda *options: run_app(app, "predict", server.address, "--model-name", "ranker", *options)


def shown(predict: Callable[..., Ran], *options: object) -> Any:
    ran = predict("--example", *options)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def answer(predict: Callable[..., Ran], directory: Path, request: Any) -> Any:
    """What a request is answered with, after it was sent back."""
    file = directory / "request.json"
    file.write_text(json.dumps(request))
    ran = predict("--json-input", file)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "mapped base": {"updates": Updates(), "map_tables": True},
    "8 bits": {"casts": ("of_.*=int8", "user/values=int8")},
}


@pytest.mark.landing
@pytest.mark.parametrize("how", HOW)
def test_a_request_of_what_the_version_knows(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    base = publish(tmp_path, **HOW[how])
    with serving(base) as predict:
        zeros = shown(predict)["instances"][0]
        request = shown(predict, "--model-base-path", base)
        (row,) = request["instances"]
        assert row == {
            **zeros,
            "word": "red",
            "tags": ["new", "old"],
            "user": row["user"],
        }
        assert row["user"] in USERS.tolist() and row["user"] != 0
        (rows,) = answer(predict, tmp_path, request)["predictions"]
        trained = {name: rows[name] for name in rows if name.endswith("_rows")}
        assert {round(value) for values in trained.values() for value in values} == {1}, trained
        program = predict("--example", "--model-base-path", base, "--as", "python").out
    assert f"np.array([{row['user']}], np.int64)" in program


@pytest.mark.parametrize("updates", [None, Updates()])
def test_joined_lookups(tmp_path: Path, updates: Updates | None) -> None:
    """Of many tables by keys, each input has keys of its own table."""
    import tensorflow as tf

    names = [f"table_{number}" for number in range(9)]

    def many() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        ids = {name: tf.compat.v1.placeholder(tf.int64, [None], f"ids_{name}") for name in names}
        found = {name: DynamicTable(name, 2).lookup(each) for name, each in ids.items()}
        return ids, {f"{name}_rows": rows for name, rows in found.items()}

    keys = {name: np.arange(100 * n + 50, 100 * n + 60) for n, name in enumerate(names)}
    tables = {name: Ev(own, np.ones((len(own), 2), np.float32)) for name, own in keys.items()}
    prefix = write_full(tmp_path / "train/model.ckpt-7", tables, dense={}, step=7)
    export(ExportRequest(prefix, tmp_path / "served", model=many, updates=updates))
    with serving(tmp_path / "served") as predict:
        request = shown(predict, "--model-base-path", tmp_path / "served")
        (row,) = request["instances"]
        assert all(row[name] in keys[name] for name in names)
        (rows,) = answer(predict, tmp_path, request)["predictions"]
    assert all(values == [1, 1] for values in rows.values())


@pytest.mark.parametrize("updates", [None, Updates()])
def test_lookups_in_functions(tmp_path: Path, updates: Updates | None) -> None:
    """A SavedModel of a trainer in TensorFlow 2, whose signatures are calls of functions."""
    import tensorflow as tf

    class Prepared(Tables):
        """Its words come out of a function, as its second result."""

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def prepared(self, words: Any) -> Any:
            return tf.strings.length(words), tf.strings.lower(words)

        def answer(self, words: Any) -> Any:
            return super().answer(self.prepared(words)[1])

    trained = tmp_path / "trained"
    Prepared(vocabulary(trained)).save(trained)
    export(ExportRequest(trained, tmp_path / "served", updates=updates))
    for base, version in ((tmp_path / "served", None), (tmp_path / "as it is", "1")):
        if version is not None:  # a server serves the trainer's own, too
            shutil.copytree(trained, base / version)
        with serving(base) as predict:
            request = shown(predict, "--model-base-path", base)
            (found,) = answer(predict, tmp_path, request)["predictions"]
        if version is None:
            assert (request["instances"], found) == ([{"words": "a"}], 8.0)


@pytest.mark.parametrize("updates", [None, Updates()])
def test_a_model_of_keras(tmp_path: Path, updates: Updates | None) -> None:
    """Its vocabularies, and its tables by rows, are layers."""
    import tensorflow as tf

    layers = tf.keras.layers
    city, user = (tf.keras.Input((size,), dtype=of, name=of) for size, of in ((1, "string"), (3, "int64")))
    cities = layers.Embedding(4, 2)(layers.StringLookup(vocabulary=["rome", "oslo"])(city))
    users = layers.Embedding(3, 2)(user)
    keras = tf.keras.Model([city, user], layers.Concatenate(axis=1)([cities, users]))
    keras.export(str(tmp_path / "trained"))
    export(ExportRequest(tmp_path / "trained", tmp_path / "served", updates=updates))
    with serving(tmp_path / "served") as predict:
        request = shown(predict, "--model-base-path", tmp_path / "served")
        assert request["instances"] == [{"string": ["rome"], "int64": [0, 0, 0]}]
        answer(predict, tmp_path, request)


def lines(file: Path, requests: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


@pytest.mark.parametrize("updates", [None, Updates()])
def test_the_first_request_of_a_warmup_file(tmp_path: Path, updates: Updates | None) -> None:
    row = shown_row()
    rows = [{**row, "word": "green"}, {**row, "word": "blue", "age": 0.1}]
    given = lines(tmp_path / "warmup.jsonl", [{"instances": rows}, {"instances": [row]}])
    base = publish(tmp_path, warmup=given, updates=updates)
    with serving(base) as predict:
        request = shown(predict, "--model-base-path", base)
        assert request == {"instances": rows}
        answer(predict, tmp_path, request)
        program = predict("--example", "--model-base-path", base, "--as", "python").out
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def shown_row() -> dict[str, Any]:
    return {"word": "red", "tags": ["old", "new"], "row": 2, "user": 11, "age": 1.5, "hashed": "a"}


def test_generated_warmup_is_no_example(tmp_path: Path) -> None:
    base = publish(tmp_path, warmup=lines(tmp_path / "warmup.jsonl", [{"instances": [zeros_row()]}]))
    with serving(base) as predict:
        assert shown(predict, "--model-base-path", base)["instances"][0]["word"] == "red"


def zeros_row() -> dict[str, Any]:
    return {"word": "", "tags": ["", ""], "row": 0, "user": 0, "age": 0.0, "hashed": ""}


def predict_record(signature: str, **arrays: Any) -> bytes:
    log = message_class("serving.PredictionLog")()
    log.predict_log.request.model_spec.signature_name = signature
    for name, array in arrays.items():
        fill(log.predict_log.request.inputs[name], array)
    return bytes(log.SerializeToString())


def examples_record(method: str, signature: str) -> bytes:
    log = message_class("serving.PredictionLog")()
    request = getattr(log, f"{method}_log").request
    request.model_spec.signature_name = signature
    features = request.input.example_list.examples.add().features.feature
    features["x"].float_list.value.extend([0.1, 2.0])
    features["label"].bytes_list.value.append(b"a")
    return bytes(log.SerializeToString())


def test_records_of_every_kind(tmp_path: Path) -> None:
    """Of classify and regress signatures only a record says with which features."""
    version = write_saved_model(tmp_path / "ranker/7")
    write_warmup(
        version,
        [
            predict_record("text", text=np.array([b"\xff", b"b"], object)),
            examples_record("classify", "classify"),
            examples_record("regress", "regress"),
        ],
    )
    base = tmp_path / "ranker"
    examples = {"examples": [{"label": "a", "x": [0.1, 2.0]}]}
    with serving(base) as predict:
        for signature, rest in (("classify", examples), ("regress", examples)):
            asked = ("--model-base-path", base, "--signature", signature)
            request = shown(predict, *asked)
            assert request == {"signature_name": signature, **rest}
            answer(predict, tmp_path, request)
            assert f"/v1/models/ranker:{signature}" in predict("--example", *asked, "--as", "curl").out
            program = predict("--example", *asked, "--as", "python").out
            ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stderr
        asked = ("--model-base-path", base, "--signature", "text")
        assert shown(predict, *asked)["instances"] == [{"text": {"b64": "/w=="}}, {"text": "b"}]
        assert "[b'\\xff', 'b']" in predict("--example", *asked, "--as", "python").out
        assert shown(predict, "--model-base-path", base, "--signature", "slow")["inputs"] == {"turns": [0]}


def test_a_version_that_is_not_there(tmp_path: Path) -> None:
    base = tmp_path / "ranker"
    write_saved_model(base / "7")
    with serving(base) as predict:
        gone = tmp_path / "gone"
        base.rename(gone)
        (base / "6").mkdir(parents=True)
        ran = predict("--example", "--model-base-path", base)
        assert ran.code == 2, ran.err
        assert "version 7 of ranker" in ran.err and "versions that are there: 6" in ran.err
        ran = predict("--example", "--model-base-path", tmp_path / "nowhere")
        assert (ran.code, "versions that are there: none" in ran.err) == (2, True)
        ran = predict("--example", "--model-base-path", gone / "7", "--json")
        assert ran.code == 2
        assert ran.error["hint"].endswith(f" --model-base-path {gone}")
        assert run_app(app, *ran.error["hint"].split()[1:]).code == 0, "the hint works as it is typed"


def test_another_version_that_is_there_and_served(tmp_path: Path) -> None:
    from serving.model_config import Every, ModelConfig

    base = tmp_path / "ranker"
    for version in (6, 7):
        write_saved_model(base / str(version))
    with ModelServer(base, name="ranker") as server:
        server.wait_available(60)
        (served,) = server.models.served().values()
        config = replace(ModelConfig("ranker", served.base_path), policy=Every())
        server.models.configure([config])
        while sum(each.state is VersionState.AVAILABLE for each in server.statuses()) < 2:
            pass
        shutil.copytree(base / "6", tmp_path / "copy/6")
        asked = ("predict", server.address, "--model-name", "ranker", "--example", "--json")
        ran = run_app(app, *asked, "--model-base-path", tmp_path / "copy")
        assert "--version 6" in ran.error["hint"]
        assert run_app(app, *ran.error["hint"].split()[1:]).code == 0


def test_damage_is_named(tmp_path: Path) -> None:
    base = publish(tmp_path)
    with serving(base) as predict:
        (version,) = (each for each in base.iterdir() if each.name.isdecimal())
        graph = version / "saved_model.pb"
        content = graph.read_bytes()
        graph.unlink()
        graph.write_bytes(content[: len(content) // 2])
        ran = predict("--example", "--model-base-path", base)
        assert (ran.code, "holds no SavedModel" in ran.err) == (3, True), ran.err
        graph.write_bytes(b"")
        assert predict("--example", "--model-base-path", base).code == 3
        write_saved_model(tmp_path / "other")
        graph.write_bytes((tmp_path / "other/saved_model.pb").read_bytes())
        ran = predict("--example", "--model-base-path", base)
        assert (ran.code, "is not what the server serves" in ran.err) == (2, True), ran.err
        graph.write_bytes(content)
        (version / "assets/words.txt").unlink()
        ran = predict("--example", "--model-base-path", base)
        assert (ran.code, "words.txt" in ran.err) == (3, True), ran.err
        (version / "assets/words.txt").write_bytes(b"\xff\xfe\n" * 3)
        assert shown(predict, "--model-base-path", base)["instances"][0]["word"] == ""
        (version / WARMUP_FILE).parent.mkdir(exist_ok=True)
        (version / WARMUP_FILE).write_bytes(b"no record")
        ran = predict("--example", "--model-base-path", base)
        assert (ran.code, "holds no warm-up requests" in ran.err) == (3, True), ran.err


def hostile(version: Path, rng: random.Random) -> Proto:
    """The version's graph after somebody changed some of it."""
    model = protos.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    graph = model.meta_graphs[0]
    nodes = [*graph.graph_def.node, *(n for f in graph.graph_def.library.function for n in f.node_def)]
    for node in rng.sample(nodes, 12):
        match rng.randrange(6):
            case 0:
                del node.input[rng.randrange(3) :]
            case 1:
                node.op = rng.choice(nodes).op
            case 2:
                node.input[:] = rng.choice(nodes).input
            case 3:
                for name in list(node.attr):
                    del node.attr[name]
            case 4:
                for value in node.attr.values():
                    value.tensor.ClearField("dtype")
                    value.shape.dim.add(size=rng.randrange(-2, 1 << 40))
            case 5:
                node.name = rng.choice(nodes).name
    return model


@pytest.mark.parametrize("updates", [None, Updates()])
def test_hostile_graphs(tmp_path: Path, updates: Updates | None) -> None:
    base = publish(tmp_path, updates=updates, no_warmup=True)
    (version,) = version_dirs(base)
    whole = choose_graph(read_saved_model(version.path), version.path, None).signature_def["serving_default"]
    copy = VersionDir(7, tmp_path / "copy", has_manifest=False)
    shutil.copytree(version.path, copy.path)
    outcomes = set()
    for seed in range(300):
        (copy.path / "saved_model.pb").unlink()
        (copy.path / "saved_model.pb").write_bytes(
            hostile(version.path, random.Random(seed)).SerializeToString()
        )
        try:
            found = example_of(copy, "serving_default", whole)
            assert isinstance(found, Mapping)
            example(whole, "serving_default", found)
            outcomes.add("an example")
        except ExportError as error:
            outcomes.add(type(error).__name__)
    assert {"an example", "GraphError"} <= outcomes


def test_it_goes_with_example_alone(tmp_path: Path) -> None:
    ran = run_app(app, "predict", "127.0.0.1:1", "--json-input", "-", "--model-base-path", tmp_path)
    assert (ran.code, "--model-base-path goes with --example" in ran.err) == (2, True)


def test_a_recorded_request_that_fills_too_much_is_no_example(tmp_path: Path) -> None:
    log = message_class("serving.PredictionLog")()
    sent = log.predict_log.request.inputs["x"]
    fill(sent, np.ones([1, 1], np.float32), as_fields=True)
    sent.tensor_shape.dim[0].size = 1 << 19
    version = write_saved_model(tmp_path / "ranker/7", width=1)
    write_warmup(version, [log.SerializeToString()])
    with serving(tmp_path / "ranker") as predict:
        ran = predict("--example", "--model-base-path", tmp_path / "ranker")
        assert (ran.code, "is too large for an example" in ran.err) == (2, True), ran.err
        assert "would be filled in" in ran.err
