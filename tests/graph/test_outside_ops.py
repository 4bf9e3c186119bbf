"""A graph that somebody else wrote takes no files, and neither writes, calls out nor runs code, unasked."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from exporter.errors import AccessRefused, NotServable
from exporter.graph import outside
from exporter.graph.inference_graph import Effect
from exporter.graph.outside import effect_of, outside_ops
from exporter.options import ExportRequest, Verify
from exporter.pipeline.full import export, plan
from exporter.wire import protos
from exporter.wire.stock_ops import is_stock
from tests.support.commands import export_model
from tests.support.foreign_models import WORDS, Answering, from_file
from tests.support.graph_runs import train
from tests.support.trained import answers_in_session

v1 = tf.compat.v1
ENDS: Any = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}

NOT_JUDGED = re.compile(
    r"""
    _?_Mkl(?!LayerNorm|FusedInstanceNorm|FusedMish|Swish|FusedBatchMatMulV2)\w+
    | Risc\w+ | TPU\w+ | Tpu\w+ | GetTpu\w+ | Xla\w*Sparse\w+ | CheckPinned
    | Xla(AllReduce|ReduceScatter)
    | _(Arg|Retval|Device(Arg|Retval)|ArrayToList|ListToArray|EagerConst|HostCast|If|While|XlaCompile|XlaRun)
    | _(CopyFrom\w+|Parallel\w+)
    | _(ReadVariablesOp|ScopedAllocator\w*|TensorToHashBucketFast|VarHandlesOp|XlaAotOnlyVarHandleOp|XlaMerge)
    | _XlaCompileMlirPlaceholderProgramKey | Copy(Host|Op|ToMesh|ToMeshGrad)? | Relayout(Like)? | DTensor\w+
    | CrossReplicaSum | AllToAll | SymbolicGradient | SerializeIterator | Prelinearize(Tuple)?
    | Iterator(FromStringHandle(V2)?|GetModelProto) | MultiDeviceIteratorFromStringHandle
    | (Get|Delete)Session\w+ | DatasetToGraph(V2)? | RewriteDataset | (Experimental)?AutoShardDataset
    | GetOptions | (Experimental)?(Set)?StatsAggregator\w+ | Reader\w+ | SyncDevice | GlobalIterId
    | ConvertTo\w+ | GetMinibatch\w+ | StoreMinibatch\w+ | GetStatsFromList\w+ | SortListOf\w+
    | \w+DedupData\w* | NegTrain | MakeWeakResourceHandle | IsResourceHandleRefCounting | StubResourceHandleOp
    | Resource(Create|Initialized|Using)Op | CustomAggregator | GetDeadline | MlirPassthroughOp
    | TemporaryVariable
    """,
    re.VERBOSE,
)
"""Operations that nobody has judged for `harmless_ops.txt`; they are refused like any that is new."""

FOR_TESTS = re.compile(
    r"""
    Test\w+ | Sleep(Identity)?Op | DevicePlacementOp | GraphDefVersion | Namespace>\w+ | A | B | Foo\d | Old
    | RequiresOlderGraphVersion | DtypeWithDefaultOp | IsTensorFloat32Enabled | Attr\w* | Binary | Unary
    | None | \w*Struct | ConstructionFails | DefaultAttrs | OpWith\w+ | (Five|Two)?(Float|Int)(In|Out)put\w*
    | Simple
    | Two(Float|Int)(In|Out)puts\w* | (Float|Int|List|Int64)(In|Out)put\w* | Func(List)?Attr | IntAttr
    | N[IP]\w+ | InPolymorphicTwice | KernelLabel\w* | OutT\w* | Polymorphic\w* | Ref(In|Out)\w*
    | Reserved\w+ | Restrict
    | StringListAttr | TwoRefsIn | TypeList\w*
    """,
    re.VERBOSE,
)
"""Registered by TensorFlow's own tests, without a kernel that a server has."""


def registry() -> list[Any]:
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    found = op_def_pb2.OpList()
    found.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return [*found.op]


def classes_of(op: str) -> list[str]:
    """Each class that has an operation; there should be one."""
    effect = effect_of(op)
    named = {"not judged": NOT_JUDGED, "for tests": FOR_TESTS}
    others = [name for name, pattern in named.items() if pattern.fullmatch(op)]
    if effect is Effect.UNKNOWN:
        return others
    return ["harmless", *others] if effect is None else [effect.name]


def test_every_operation_of_tensorflow_is_judged_once() -> None:
    """A new one belongs into `harmless_ops.txt` or `_EFFECTS` when it is judged, and above until then."""
    ops = [op.name for op in registry()]
    assert len(ops) > 1800
    assert {op: found for op in ops if len(found := classes_of(op)) != 1} == {}


def test_no_effect_has_a_harmless_operation() -> None:
    lines = (Path(outside.__file__).parent / "harmless_ops.txt").read_text().splitlines()
    listed = [op for line in lines if not line.startswith("#") for op in line.split()]
    assert len(listed) == len({*listed})
    assert [op for op in listed if effect_of(op) is not None] == []
    assert {*listed} <= {op.name for op in registry()}, "an operation that TensorFlow lacks"


def node_of(op: Any) -> Any:
    """A node of an operation with the attributes that have to be given, filled with nothing."""
    node = protos.NodeDef(name="node", op=op.name)
    node.input.extend(f"in{place}" for place, _ in enumerate(op.input_arg))
    for each in op.attr:
        if not each.HasField("default_value"):
            node.attr[each.name].SetInParent()
    return node


def test_an_operation_that_takes_texts_is_refused_or_known_to_be_harmless() -> None:
    """Paths, addresses and programs are texts, so these are asked of the judge itself, one graph each."""
    harmless = 0
    for op in registry():
        takes = any(each.type == types_pb2.DT_STRING or each.type_attr for each in op.input_arg)
        if not takes and not any(each.type in ("string", "list(string)", "func") for each in op.attr):
            continue
        found = outside_ops(protos.GraphDef(node=[node_of(op)]))
        is_foreign = not is_stock(op.name) and effect_of(op.name) is Effect.UNKNOWN
        harmless += not found
        assert found or is_foreign or classes_of(op.name) == ["harmless"] or op.name in UNLESS, op.name
    assert harmless > 300


UNLESS = {"PrintV2", "DecodeProtoV2", "EncodeProto", "FixedUnigramCandidateSampler", "ParseTensor"} | {
    f"Debug{name}" for name in ("Identity", "IdentityV2", "IdentityV3", "NanCount", "NumericSummary")
}
"""Operations that reach out if an attribute says so."""


@pytest.mark.parametrize(
    ("op", "effect"),
    [
        ("ReadFile", Effect.READS),
        ("WriteFile", Effect.WRITES),
        ("MergeV2Checkpoints", Effect.WRITES),
        ("RpcCall", Effect.CALLS),
        ("EagerPyFunc", Effect.RUNS),
        ("Abort", Effect.RUNS),
        ("DatasetFromGraph", Effect.RUNS),
        ("DeserializeIterator", Effect.RUNS),
        ("XlaCustomCallV2", Effect.RUNS),
        ("OfANewerTensorFlow", Effect.UNKNOWN),
        ("MatMul", None),
        ("ResourceGather", None),
    ],
)
def test_effects(op: str, effect: Effect | None) -> None:
    assert effect_of(op) is effect


@pytest.mark.parametrize("op", ["DeserializeSparse", "DeserializeManySparse"])
@pytest.mark.parametrize(
    ("dtype", "is_harmless"),
    [(types_pb2.DT_FLOAT, True), (types_pb2.DT_RESOURCE, False), (types_pb2.DT_VARIANT, False)],
)
def test_sparse_tensors_of_texts_hold_no_handles(op: str, dtype: int, is_harmless: bool) -> None:
    node = protos.NodeDef(name="node", op=op, input=["in"])
    node.attr["dtype"].type = dtype
    assert (outside_ops(protos.GraphDef(node=[node])) == []) is is_harmless


def test_a_sparse_tensors_type_is_not_left_to_a_call() -> None:
    node = protos.NodeDef(name="node", op="DeserializeSparse", input=["in"])
    node.attr["dtype"].placeholder = "T"
    assert outside_ops(protos.GraphDef(node=[node]))


@pytest.mark.parametrize("is_filled", [False, True])
def test_memory_that_others_left_is_not_given_out(is_filled: bool) -> None:
    node = protos.NodeDef(name="node", op="Empty", input=["in"])
    node.attr["init"].b = is_filled
    assert (outside_ops(protos.GraphDef(node=[node])) == []) is is_filled


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir(exist_ok=True)
    path.write_text("a\nsecret\n")
    return path


def looked_up(path: Any) -> Callable[[Any], None]:
    def build(v1: Any) -> None:
        x = v1.placeholder(tf.string, [None], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        tf.identity(tf.lookup.StaticHashTable(from_file(str(path)), -1).lookup(x), name="y")

    return build


def trained_in(tmp_path: Path, build: Callable[[Any], None]) -> Path:
    """A checkpoint with its graph beside it."""
    directory = tmp_path / "bucket"
    directory.mkdir()
    train(directory, build)
    return directory


def assert_nothing_published(tmp_path: Path) -> None:
    assert not [*(tmp_path / "model").glob("[0-9]*")]


@pytest.mark.parametrize("way", ["absolute", "above", "link"])
def test_a_found_graph_takes_no_file_of_another_directory(way: str, tmp_path: Path) -> None:
    """Trained where the file is, found where it is somebody's secret."""
    path = secret(tmp_path)
    directory = tmp_path / "bucket"
    named = {"absolute": str(path), "above": "../home/id_rsa", "link": "words.txt"}[way]
    directory.mkdir()
    before = Path.cwd()
    if way == "link":
        (directory / "words.txt").symlink_to(path)
    try:
        os.chdir(directory)
        train(directory, looked_up(named))
    finally:
        os.chdir(before)
    request = ExportRequest(directory, tmp_path / "model", **ENDS)
    with pytest.raises(AccessRefused, match="in another directory") as caught:
        export(request)
    assert "--allow files" in (caught.value.hint or "")
    assert_nothing_published(tmp_path)

    allowed = ExportRequest(directory, tmp_path / "allowed", allow=f"files={path.parent}", **ENDS)
    meta = str(next(directory.glob("*.meta")))
    for done in (allowed, ExportRequest(directory, tmp_path / "named", meta, **ENDS)):
        version = export(done).published.path
        assert answers_in_session(version, {"x": ["secret"]})["y"].tolist() == [1]


def test_a_found_graph_takes_files_beside_it_and_none_of_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "bucket"
    directory.mkdir()
    (directory / "words.txt").write_text("own\n")
    monkeypatch.chdir(directory)
    train(directory, looked_up("words.txt"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "words.txt").write_text("other\n")
    monkeypatch.chdir(elsewhere)
    version = export(
        ExportRequest(directory, tmp_path / "model", verify=Verify.OUTPUTS, **ENDS)
    ).published.path
    assert (version / "assets/words.txt").read_text() == "own\n"


def test_a_found_saved_models_linked_asset_is_refused(tmp_path: Path) -> None:
    path = secret(tmp_path)

    class Lines(Answering):
        def __init__(self) -> None:
            super().__init__()
            self.lines = tf.lookup.StaticHashTable(from_file(str(path)), -1)

        def answer(self, words: Any) -> Any:
            return self.lines.lookup(words)

    Lines().save(tmp_path / "source")
    asset = tmp_path / "source/assets/id_rsa"
    asset.unlink()
    asset.symlink_to(path)
    with pytest.raises(AccessRefused, match="in another directory"):
        export(ExportRequest(tmp_path / "source", tmp_path / "model"))
    named = ExportRequest(tmp_path / "source", tmp_path / "named", str(tmp_path / "source"))
    assert export(named).published.path.exists()


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_a_found_archive_takes_no_vocabulary_of_another_directory(name: str, tmp_path: Path) -> None:
    path = secret(tmp_path)
    keras = importlib.import_module(name)
    word = keras.Input([1], dtype="string", name="word")
    ids = keras.layers.StringLookup(vocabulary=["a", "b"])(word)
    model = keras.Model(word, keras.layers.Embedding(9, 2)(ids))
    config = json.loads(model.to_json())
    (lookup,) = (e for e in config["config"]["layers"] if e["class_name"] == "StringLookup")
    lookup["config"]["vocabulary"] = str(path)
    archive = tmp_path / "bucket" / "model.keras"
    archive.parent.mkdir()
    model.save(archive)
    rewrite(archive, json.dumps(config))
    with pytest.raises(AccessRefused, match="in another directory"):
        export(ExportRequest(archive, tmp_path / "model"))
    assert_nothing_published(tmp_path)


def rewrite(archive: Path, config: str) -> None:
    """Put another config into a Keras archive."""
    import zipfile

    with zipfile.ZipFile(archive) as before:
        members = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(archive, "w") as after:
        for name, content in members.items():
            after.writestr(name, config.encode() if name == "config.json" else content)


def read_constant(path: Path) -> Callable[[Any], None]:
    def build(v1: Any) -> None:
        v1.placeholder(tf.string, [None], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        tf.identity(tf.io.read_file(str(path)), name="y")

    return build


def read_what_is_asked(v1: Any) -> None:
    x = v1.placeholder(tf.string, [None], name="x")
    v1.get_variable("w", [], initializer=v1.ones_initializer())
    tf.identity(tf.map_fn(tf.io.read_file, x), name="y")


def cached_on_disk(path: Path) -> Callable[[Any], None]:
    def build(v1: Any) -> None:
        x = v1.placeholder(tf.int64, [], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        dataset = tf.data.Dataset.range(x).cache(str(path))
        tf.identity(dataset.reduce(np.int64(0), lambda a, b: a + b), name="y")

    return build


@pytest.mark.parametrize("is_named", [False, True], ids=["found", "named"])
@pytest.mark.parametrize(
    ("build", "op"),
    [
        (lambda tmp_path: read_constant(secret(tmp_path)), "ReadFile"),
        (lambda tmp_path: read_what_is_asked, "ReadFile"),
        (lambda tmp_path: cached_on_disk(tmp_path / "cache"), "CacheDataset"),
    ],
    ids=["constant path", "path of a request", "written cache"],
)
def test_operations_on_files_are_refused_by_name(
    build: Callable[[Path], Callable[[Any], None]], op: str, is_named: bool, tmp_path: Path
) -> None:
    directory = trained_in(tmp_path, build(tmp_path))
    model = str(next(directory.glob("*.meta"))) if is_named else None
    with pytest.raises(AccessRefused, match=op) as caught:
        export(ExportRequest(directory, tmp_path / "model", model, **ENDS))
    assert "--allow file-ops" in (caught.value.hint or "")
    assert_nothing_published(tmp_path)

    planned = plan(ExportRequest(directory, tmp_path / "model", model, allow="file-ops", **ENDS))
    assert any(op in note for note in planned.notes)


def test_what_is_allowed_stands_in_the_plan(tmp_path: Path) -> None:
    directory = trained_in(tmp_path, read_constant(secret(tmp_path)))
    ends = ("--input", "x=x", "--output", "y=y")
    ran = export_model(
        "--ckpt-dir", directory, "--out", tmp_path / "m", *ends, "--allow", "file-ops", "--dry-run", "--json"
    )
    assert ran.code == 0 and any("ReadFile" in note for note in ran.document["notes"])


class Initialised(Answering):
    """A table whose initialiser does something else as well."""

    def __init__(self, besides: Callable[[], Any]) -> None:
        super().__init__()

        class Initializer(tf.lookup.KeyValueTensorInitializer):  # type: ignore[misc]
            def initialize(self, table: Any) -> Any:
                with tf.control_dependencies([besides()]):
                    return super().initialize(table)

        contents = Initializer(tf.constant(["a"]), tf.constant([1], tf.int64))
        self.lines = tf.lookup.StaticHashTable(contents, -1)

    def answer(self, words: Any) -> Any:
        return self.lines.lookup(words)


def test_an_init_function_that_writes_is_refused(tmp_path: Path) -> None:
    written = tmp_path / "written"
    Initialised(lambda: tf.raw_ops.WriteFile(filename=str(written), contents="x")).save(tmp_path / "source")
    written.unlink()
    with pytest.raises(AccessRefused, match=r"WriteFile .* in function .* writes files"):
        export(ExportRequest(tmp_path / "source", tmp_path / "model"))
    for verify in (Verify.FILES, Verify.OUTPUTS):
        request = ExportRequest(
            tmp_path / "source", tmp_path / "model", allow="file-ops", verify=verify, plain=True
        )
        if verify is Verify.OUTPUTS:
            with pytest.raises(AccessRefused, match=r"--verify outputs would run .*WriteFile"):
                export(request)
        else:
            export(request)
    assert not written.exists(), "nothing ran it here"


def test_golden_requests_run_nothing_that_writes(tmp_path: Path) -> None:
    written = tmp_path / "written"
    Initialised(lambda: tf.raw_ops.WriteFile(filename=str(written), contents="x")).save(tmp_path / "source")
    written.unlink()
    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps({"requests": [{"instances": [{"words": "a"}]}]}))
    request = ExportRequest(tmp_path / "source", tmp_path / "model", allow="file-ops", golden=golden)
    with pytest.raises(AccessRefused, match="--golden would run"):
        export(request)
    assert not written.exists()


def test_python_in_an_init_function_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    Initialised(lambda: tf.py_function(lambda: 1, [], tf.int64)).save(tmp_path / "source")
    with pytest.raises(NotServable, match="calls Python"):
        export(ExportRequest(tmp_path / "source", tmp_path / "model", allow=["file-ops", "code"]))


def test_outputs_that_write_are_not_compared(tmp_path: Path) -> None:
    """The source graph runs as its author left it: what an output waits for runs, too."""
    written = tmp_path / "written"

    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        with tf.control_dependencies([tf.io.write_file(str(written), "x")]):
            tf.multiply(x, w, name="y")

    directory = trained_in(tmp_path, build)
    request = ExportRequest(directory, tmp_path / "model", verify=Verify.OUTPUTS, **ENDS)
    with pytest.raises(AccessRefused, match=r"--verify outputs would run .*WriteFile"):
        export(request)
    assert not written.exists()
    assert_nothing_published(tmp_path)
    export(ExportRequest(directory, tmp_path / "model", **ENDS))
    (tmp_path / "again").mkdir()
    export(ExportRequest(directory, tmp_path / "trusted", verify=Verify.OUTPUTS, allow="code", **ENDS))
    assert written.exists(), "it was allowed"


def test_reads_of_a_versions_own_files_are_no_reach(tmp_path: Path) -> None:
    """An asset read in nested functions, and one file given twice: by an asset, and by a request."""
    words = tmp_path / "words.txt"
    words.write_text("a")

    class Reads(Answering):
        def __init__(self, is_hostile: bool) -> None:
            super().__init__()
            self.path = tf.saved_model.Asset(str(words))
            self.is_hostile = is_hostile

        @tf.function
        def content(self, path: Any) -> Any:
            return tf.strings.length(tf.io.read_file(tf.identity(path)))

        def answer(self, words: Any) -> Any:
            length = self.content(self.path.asset_path)
            other = self.content(words[0]) if self.is_hostile else 0
            return tf.cast(tf.strings.length(words) + length + other, tf.int64)

    Reads(is_hostile=False).save(tmp_path / "good")
    version = export(ExportRequest(tmp_path / "good", tmp_path / "model")).published.path
    assert answers_in_session(version, {"words": WORDS})["y"].tolist() == [4.0] * 4
    Reads(is_hostile=True).save(tmp_path / "bad")
    with pytest.raises(AccessRefused, match="ReadFile"):
        export(ExportRequest(tmp_path / "bad", tmp_path / "model"))
