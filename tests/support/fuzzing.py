"""Small real files of every kind that is read, damaged by seed; each is read in a child with limits.

An outcome is good if the child ends in time, within its memory, with an exit code of the table and, if it
fails, with an error that has a name; nothing of an attempt may stay behind.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from exporter.bundle.warmup import parse_request
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.sstable import read_table, write_table
from exporter.errors import ExportError
from exporter.storage.files import read_regular
from exporter.storage.layout import PUSHED_FILE
from exporter.verify.golden import read_golden
from exporter.wire import protos
from exporter.wire.crc32c import extend
from exporter.wire.tensor_proto import to_array
from serving.agent_command import PortFlags
from serving.credentials import server_credentials
from serving.model_config import read_servers_config
from serving.models import ConfigFile
from serving.rest import metrics_path
from serving.server_options import ServerOptions
from tests.support import deeprec_logs
from tests.support.archives import keras_archive, legacy_file, npy, weights_file, zip_of
from tests.support.bundles import compressed, compressed_table, write
from tests.support.certificates import Certified
from tests.support.commands import Bad, run_command
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.directory_store import BUCKET
from tests.support.logs import Serving, Trainer, publish_base, save_increment

SECONDS = 30.0
MORE_MEMORY_BYTES = 1 << 30
_LONGEST_REPORT = 4000

Run = Callable[[Path], None]


@dataclass(frozen=True)
class Kind:
    """Files of one kind: how they are made, which of them are damaged, and what reads them."""

    make: Callable[[Path], object]
    victims: tuple[str, ...]
    runs: tuple[Run, ...]


@dataclass
class Outcome:
    """What one damaged input ended in."""

    seed: int
    kind: str
    said: str
    seconds: float
    memory_bytes: int
    is_good: bool
    files: list[str] = field(default_factory=list)


# --- damage ------------------------------------------------------------------------------------------------

_BYTES = (0, 1, 0x7F, 0x80, 0xFF)
_NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    None, True, {}, [], "", "\0", "\ud800", "../../x", "a" * 300, -1, 0, 1e308, 10**18 - 1, 10**18, 2**63,
    10**20, 10**400,
    [[]], {"": {}}, [0] * 1000, "NaN", "9" * 30,
)  # fmt: skip
_NAMES = ("", "\0", "\ud800", "../../x", "/etc/passwd", "~/x", "a" * 300, "deltas/hold", "\x1b[2J", "\u0100")


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled, or the end lost."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(out) + 1)
        size = rng.choice([1, 2, 4, 8, 8, 64, 1000])
        match rng.randrange(8):
            case 0 | 1 | 2:
                out[at : at + 1] = bytes([rng.choice([*_BYTES, rng.randrange(256)])])
            case 3 | 4:
                number = rng.choice(_NUMBERS)
                width = rng.choice([4, 8])
                out[at : at + width] = struct.pack("<Q", number)[:width]
            case 5:
                del out[at : at + size]
            case 6:
                out[at:at] = out[at : at + size]
            case _:
                del out[at:]
    return bytes(out)


def _changed_json(data: bytes, rng: random.Random) -> bytes:
    """One value of a document replaced by an odd one, or a key lost; by chance the text itself."""
    if rng.random() < 0.2:
        return flipped(data, rng)
    if rng.random() < 0.05:
        deep = rng.choice([500, 100_000])
        return b"[" * deep + b"]" * deep
    try:
        document = json.loads(data)
    except ValueError:
        return flipped(data, rng)
    for _ in range(rng.choice([1, 1, 2])):
        places = list(_places(document))
        if not places:
            break
        holder, key = rng.choice(places)
        chance = rng.random()
        if chance < 0.15:
            del holder[key]
        elif chance < 0.3 and isinstance(holder, dict):
            holder[rng.choice(_NAMES)] = holder.pop(key)
        elif chance < 0.6:  # a value that stands elsewhere: ranges that overlap, names that are there twice
            other, its_key = rng.choice(places)
            holder[key] = copy.deepcopy(other.get(its_key) if isinstance(other, dict) else other[-1])
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return json.dumps(document).encode()


def _changed_addresses(data: bytes, rng: random.Random) -> bytes:
    """Fields that may hold a place in the file lead elsewhere: cycles, objects that share their bytes."""
    found = {at: struct.unpack_from("<Q", data, at)[0] for at in range(0, len(data) - 8, 8)}
    places = [at for at, number in found.items() if 0 < number < len(data)]
    if not places:
        return flipped(data, rng)
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.choice(places)
        struct.pack_into("<Q", out, at, rng.choice([at, found[rng.choice(places)], *_NUMBERS]))
    return bytes(out)


def _changed_node(data: bytes, rng: random.Random) -> bytes:
    """A file of an OCDBT store whose checksum is right."""
    content = flipped(data[:-4], rng)
    return content + extend(0, content).to_bytes(4, "little")


def _changed_text(data: bytes, rng: random.Random) -> bytes:
    """A number, a word or a text of a configuration replaced by an odd one, a block nested in itself."""
    found = list(re.finditer(rb'"[^"]*"|[A-Za-z_]+|-?[0-9]+|\{[^{}]*\}', data))
    if not found or rng.random() < 0.2:
        return flipped(data, rng)
    place = rng.choice(found)
    if place[0].startswith(b"{"):
        new = place[0] * rng.choice([2, 1000]) if rng.random() < 0.5 else b"{a" * 5000 + b"}" * 5000
    elif place[0].startswith(b'"'):
        new = (
            b'"'
            + rng.choice([*(name.encode("utf-8", "replace") for name in _NAMES), b"\xff", b"\x1b"])
            + b'"'
        )
    else:
        new = rng.choice([b"", b'""', b"-1", b"nan", b"true", b"{", *(str(n).encode() for n in _NUMBERS)])
    return data[: place.start()] + new + data[place.end() :]


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _changed_table(data: bytes, rng: random.Random, path: Path) -> bytes:
    """An index whose checksums are right and whose entries are not."""
    entries = dict(read_table(data, path))
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(list(entries))
        if rng.random() < 0.2:
            value = entries.pop(key)
            entries[flipped(key, rng)[:1000]] = value
        else:
            entries[key] = flipped(entries[key], rng)
    if rng.random() < 0.2:
        return compressed_table(sorted(entries.items()), pack=lambda block: flipped(compressed(block), rng))
    return write_table(sorted(entries.items()))


def _changed_zip(path: Path, rng: random.Random) -> None:
    """A member changed, with its checksum right."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = rng.choice(list(members))
    if rng.random() < 0.1:
        members[flipped(name.encode(), rng).decode("latin1")[:200].lstrip("\0") or "x"] = members.pop(name)
    else:
        change = _changed_json if name.endswith(".json") else flipped
        members[name] = change(members[name], rng)
    zip_of(path, list(members.items()), compression=rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))


def _become_something_else(path: Path, top: Path, rng: random.Random) -> None:
    """A pipe, a directory, a link to itself, nothing; a hole; another name; or what may not be read."""
    match rng.randrange(7):
        case 0 | 1 | 2:
            path.unlink()
            rng.choice([lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to(path), lambda: None])()
        case 3 | 4:
            place = rng.choice([path, path, *(up for up in path.parents if up != top and top in up.parents)])
            number = rng.choice([*_NUMBERS, 10**18 - 1, 10**18, 10**20])
            name = rng.choice([re.sub("[0-9]+", str(number), place.name), str(number), f"{place.name}\udcff"])
            with suppress(OSError):
                place.rename(place.with_name(name[:250]))
        case 5:
            content = path.read_bytes()
            path.unlink()  # a hard link's other name keeps its size
            path.write_bytes(content)
            os.truncate(path, 1 << 40)
        case _:
            place = rng.choice([path, path.parent])
            if place != top:
                place.chmod(0)  # which binds everybody but root


def damage(path: Path, top: Path, rng: random.Random) -> None:
    """Change a file under `top` in a way that its kind makes interesting; or it becomes something else."""
    chance = rng.random()
    if chance < 0.1 and OBJECTS not in path.parts:  # an object of a store is bytes, under a name that is text
        _become_something_else(path, top, rng)
        return
    data = path.read_bytes()
    if path.suffix == ".json" or path.name in (PUSHED_FILE, "_METADATA", ".zarray"):
        data = _changed_json(data, rng)
    elif path.suffix == ".config":
        data = _changed_text(data, rng)
    elif path.suffix == ".index" and chance < 0.7:
        data = _changed_table(data, rng, path)
    elif path.suffix in (".npz", ".keras") and chance < 0.6:
        _changed_zip(path, rng)
        return
    elif path.suffix == ".safetensors" and chance < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = _changed_json(data[8 : 8 + size], rng)
        data = len(header).to_bytes(8, "little") + header + data[8 + size :]
    elif path.suffix == ".h5" and chance < 0.6:
        data = _changed_addresses(data, rng)
    elif (path.name == "manifest.ocdbt" or path.parent.name == "d") and chance < 0.7:
        data = _changed_node(data, rng)
    elif data[:4].isdigit() or path.name == "checkpoint":
        data = re.sub(rb"[0-9]+", lambda _: str(rng.choice((*_NUMBERS, 10**18, 10**20))).encode(), data)
    else:
        data = flipped(data, rng)
    path.unlink()  # a hard link's other name keeps what it had
    path.write_bytes(data)


# --- what is read ------------------------------------------------------------------------------------------


def _commands(*lines: str) -> tuple[Run, ...]:
    """Command lines in which `@` stands for the directory."""

    def run(line: str) -> Run:
        return lambda directory: run_command(*line.replace("@", str(directory)).split())

    return tuple(map(run, lines))


def _read_all(name: str) -> Run:
    """Every value of a checkpoint."""

    def run(directory: Path) -> None:
        catalog = open_checkpoint(directory / name)
        for ref in catalog.tensors.values():
            if ref.content is not None:
                for _ in ref.content.blocks():
                    pass

    return run


def _nothing_left(model: Path) -> None:
    left = [path.name for path in model.glob(".staging-*")] if model.is_dir() else []
    if left:
        raise Bad(f"{left} stay behind")


def _log(directory: Path) -> None:
    """A model with a base and three deltas, and a trainer that has gone on since."""
    trainer = Trainer(directory / "train")
    trainer.save()
    publish_base(trainer, Serving(), directory / "m")
    for _ in range(3):
        trainer.train()
        trainer.increment()
        run_command("--ckpt-dir", directory / "train", "--out", directory / "m", "--incr")
    trainer.train()
    trainer.increment()
    trainer.train()
    trainer.save()


def _held_log(directory: Path) -> None:
    _log(directory)
    positions = sorted(path.name.split("-")[1] for path in (directory / "m").glob("deltas/*/*-*"))
    run_command("rollback", directory / "m", "--to", int(positions[0]))


def _deeprec(directory: Path) -> None:
    trainer = Trainer(directory / "train")
    trainer.save()
    publish_base(trainer, Serving(), directory / "m")
    for _ in range(2):
        trainer.train()
        save_increment(trainer)


def _tables(directory: Path) -> None:
    """Embedding variables and their graph; made in another process, since attempts are forks of this one."""
    code = (
        "import sys; from pathlib import Path; from tests.support.deeprec_models import Trainer\n"
        "t = Trainer(Path(sys.argv[1])); t.save(); t.train(1); t.save_increment()"
    )
    made = [sys.executable, "-c", code, str(directory / "ctr")]
    subprocess.run(made, check=True, capture_output=True, cwd=Path(__file__).parent.parent.parent)


def _table_log(directory: Path) -> None:
    """A model with two dynamic tables, and a trainer that has gone on since."""
    trainer = DeepRecTrainer(directory / "train")
    trainer.train()
    trainer.save()
    deeprec_logs.publish_base(trainer, directory / "m")
    trainer.train()
    trainer.increment()
    run_command("--ckpt-dir", directory / "train", "--out", directory / "m", "--incr")
    trainer.train()
    trainer.increment()


_TABLES = "--ckpt-dir @/ctr --input user=user --input items=items --output scores=scores"

_META = """
meta_info_def { tags: "train" }
graph_def {
  node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }
         attr { key: "shape" value { shape { dim { size: -1 } dim { size: 4 } } } } }
  node { name: "w" op: "VarHandleOp" attr { key: "dtype" value { type: DT_FLOAT } }
         attr { key: "shape" value { shape { dim { size: 4 } } } }
         attr { key: "shared_name" value { s: "w" } } attr { key: "container" value { s: "" } } }
  node { name: "w/Read" op: "ReadVariableOp" input: "w" attr { key: "dtype" value { type: DT_FLOAT } } }
  node { name: "y" op: "Mul" input: "x" input: "w/Read" attr { key: "T" value { type: DT_FLOAT } } }
  versions { producer: 2000 }
}
"""


def _graph(directory: Path) -> None:
    from google.protobuf import text_format

    write(directory / "train" / "model.ckpt-7")
    graph = text_format.Parse(_META, protos.message_class("MetaGraphDef")())
    (directory / "train" / "model.ckpt-7.meta").write_bytes(graph.SerializeToString())
    (directory / "train" / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-7"\n')
    signatures = {"serving_default": {"inputs": {"a": "x:0"}, "outputs": {"b": "y:0"}, "method": "predict"}}
    (directory / "signatures.json").write_text(json.dumps(signatures))
    (directory / "names.txt").write_text("w w\n")
    request = {"signature_name": "serving_default", "inputs": {"a": [[1.0, 2.0, 3.0, 4.0]]}}
    (directory / "warmup.json").write_text(json.dumps(request))
    line = "--ckpt-dir @/train --model @/train/model.ckpt-7.meta --signatures @/signatures.json --out @/first"
    _commands(line)[0](directory)
    assert (directory / "first" / "7" / "saved_model.pb").is_file()


def _requests(directory: Path) -> None:
    proto = protos.TensorProto(dtype=1, float_val=[1.0, 2.0])
    proto.tensor_shape.dim.add().size = 2
    (directory / "tensor").write_bytes(proto.SerializeToString())
    requests: dict[str, Any] = {
        "rows": {"instances": [{"a": [1.0, 2.0], "t": "x"}, {"a": [3.0, 4.0], "t": {"b64": "eHg="}}]},
        "columns": {"signature_name": "serving_default", "inputs": {"a": [[1.0, 2.0]], "t": ["x"]}},
        "examples": {"signature_name": "scores", "context": {"c": 1}, "examples": [{"a": [1.0]}, {"t": "x"}]},
    }
    for name, request in requests.items():
        (directory / f"{name}.json").write_text(json.dumps(request))


def _read_tensor(directory: Path) -> None:
    from google.protobuf.message import DecodeError

    with suppress(ValueError, DecodeError, OSError):
        to_array(protos.TensorProto.FromString(read_regular(directory / "tensor", 1 << 30)), 1 << 20)


def _read_requests(directory: Path) -> None:
    definition = protos.message_class("SignatureDef")
    predict = definition(method_name="tensorflow/serving/predict")
    for alias, dtype in (("a", 1), ("t", 7)):
        predict.inputs[alias].name, predict.inputs[alias].dtype = f"{alias}:0", dtype
        predict.inputs[alias].tensor_shape.unknown_rank = True
    scores = definition(method_name="tensorflow/serving/classify")
    scores.inputs["inputs"].name, scores.inputs["inputs"].dtype = "e:0", 7
    for path in sorted(directory.glob("*.json")):
        with suppress(ValueError, OSError):
            parse_request(
                read_regular(path, 1 << 30).decode(), {"serving_default": predict, "scores": scores}
            )


def _safetensors(directory: Path) -> None:
    """A file, and the same tensors in shards with a list of them."""
    tensors = {"w": np.ones((3, 4), np.float32), "b": np.arange(3), "global_step": np.array(7)}
    save_file(tensors, directory / "m.safetensors", metadata={"format": "tf"})
    (directory / "sharded").mkdir()
    places = {name: f"m-{at:05}-of-00003.safetensors" for at, name in enumerate(tensors, 1)}
    for name, place in places.items():
        save_file({name: tensors[name]}, directory / "sharded" / place)
    (directory / "sharded/m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _orbax(directory: Path) -> None:
    """One tree in plain zarr, and in a store."""
    with tarfile.open(Path(__file__).parents[1] / "fixtures/orbax/0.12.8.tar.xz") as archive:
        archive.extractall(directory, filter="data")


def _sharded_keras(directory: Path) -> None:
    weights_file(directory / "m_00000.weights.h5")
    groups = {"/layers/dense/vars": "m_00000.weights.h5", "/layers/dense_1/vars": ["m_00000.weights.h5"]}
    (directory / "m.weights.json").write_text(json.dumps({"metadata": {}, "weight_map": groups}))


def _legacy(directory: Path) -> None:
    layers = {"hidden": {"hidden/kernel:0": np.ones((3, 4), np.float32)}, "out": {"out/bias:0": np.zeros(1)}}
    legacy_file(directory / "m.h5", layers, keras_version="2.12.0", model_config="{}")


def _packed(directory: Path) -> None:
    import h5py

    with h5py.File(directory / "m.weights.h5", "w") as file:
        value = np.arange(20_000, dtype=np.float32).reshape(-1, 10)
        file.create_dataset("layers/dense/vars/0", data=value, compression="gzip", shuffle=True)
        file.create_dataset("layers/dense/vars/1", data=value[:7].astype(">f4"))


_MODELS = """model_config_list {
  config { name: "ranker" base_path: "/models/ranker" model_platform: "tensorflow"
           model_version_policy { specific { versions: 7 versions: 9 } }
           version_labels { key: "stable" value: 7 } }
  config { name: "other" base_path: "/models/other" model_platform: "tensorflow"
           model_version_policy { latest { num_versions: 2 } } }
}
"""
_BATCHING = """max_batch_size { value: 128 } batch_timeout_micros { value: 0 } num_batch_threads { value: 4 }
allowed_batch_sizes: 1 allowed_batch_sizes: 128 pad_variable_length_inputs: true
"""
_EXPECTED = {"score": {"min": 0, "max": 1}, "logits": {"near": [[0.2, 1.4]], "tolerance": 0.5, "drift": 0.1}}


def _configurations(directory: Path) -> None:
    """What `serve-model run` and `serve-model agent` read at their start, or again as they run."""
    server = Certified(directory / "pki").config(directory / "ssl.config", verify=True)
    shutil.rmtree(directory / "pki")
    for name, text in {
        "models": _MODELS,
        "batching": _BATCHING,
        "monitoring": 'prometheus_config { enable: true path: "/metrics" }',
        "session": "intra_op_parallelism_threads: 2 gpu_options { allow_growth: true }",
    }.items():
        server.with_name(f"{name}.config").write_text(text)
    (directory / "token").write_text("s3cret\n")
    request = {"name": "known", "instances": [{"user": 7, "item": 3}], "expect": _EXPECTED}
    (directory / "golden.json").write_text(json.dumps({"requests": [request]}))


def _read_configurations(directory: Path) -> None:
    """Each by what a server does with it; all of them, whichever is refused."""
    for read in (
        lambda: ConfigFile(directory / "models.config").read(),
        lambda: read_servers_config("--rebuild-config", directory / "models.config", ["ranker"]),
        lambda: metrics_path(directory / "monitoring.config"),
        lambda: server_credentials(directory / "ssl.config"),
        lambda: ServerOptions(tensorflow_session_config_file=directory / "session.config").loading(),
        lambda: PortFlags(token_file=str(directory / "token")).token(),
        lambda: read_golden(directory / "golden.json"),
    ):
        _guarded(lambda _, read=read: read(), directory)  # type: ignore[misc]


_URL, OBJECTS = f"s3://{BUCKET}/m", "bucket"


def _store(directory: Path) -> None:
    """A held model in a store, whose objects are files; the model that was pushed, and a copy of it."""
    _held_log(directory)
    _in_a_process(directory, ("push", "@/m", _URL), ("pull", _URL, "@/copy"))
    assert (directory / "copy" / PUSHED_FILE).is_file()


def _use_store(directory: Path) -> None:
    some = ("history", "verify", "merge --dry-run")
    lines = [(name, _URL, *rest) for name, *rest in map(str.split, some)]
    _in_a_process(directory, *lines, ("pull", _URL, "@/copy"), ("push", "@/m", _URL), ("resume", _URL))
    outside = {path.name for path in directory.iterdir()} - {"train", "m", "copy", OBJECTS}
    if outside:
        raise Bad(f"{outside} appeared")


def _in_a_process(directory: Path, *lines: tuple[str, ...]) -> None:
    """Commands in a process of their own: the library that reads stores does not work in a fork."""
    code = (
        "import json, os, sys; from pathlib import Path\n"
        "from tests.support.directory_store import directory_store\n"
        "from tests.support.commands import run_command\n"
        f"with directory_store(Path(sys.argv[1]) / {OBJECTS!r}) as (environment, _):\n"
        "    os.environ |= environment\n"
        "    for line in json.loads(sys.argv[2]): run_command(*line)"
    )
    asked = json.dumps([[part.replace("@", str(directory)) for part in line] for line in lines])
    made = [sys.executable, "-c", code, str(directory), asked]
    few = os.environ | {
        "MALLOC_ARENA_MAX": "1"
    }  # else each thread takes 64 MB of addresses, which are limited
    place = Path(__file__).parent.parent.parent
    ran = subprocess.run(made, capture_output=True, text=True, cwd=place, env=few)
    if ran.returncode:
        raise Bad(ran.stderr[-_LONGEST_REPORT:])


_INCREMENTAL = _commands(
    "--ckpt-dir @/train --out @/m --incr --json",
    "verify @/m --json",
    "merge @/m",
    "resume @/m",
    "diff @/train @/m",
    "inspect @/m --json",
)
_MODEL = "--ckpt-dir @/train --model @/train/model.ckpt-7.meta --signatures @/signatures.json"

KINDS: Mapping[str, Kind] = {
    "bundle": Kind(
        lambda directory: (
            [write(directory / "train" / f"model.ckpt-{n}") for n in (7, 9)]
            and (directory / "train" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-9"')
        ),
        ("train/*",),
        _commands("inspect @/train --json", "diff @/train/model.ckpt-7 @/train/model.ckpt-9"),
    ),
    "npz": Kind(
        lambda directory: zip_of(
            directory / "m.npz", [("w.npy", npy(np.ones((3, 4)))), ("b.npy", npy(np.arange(3)))]
        ),
        ("m.npz",),
        (*_commands("inspect @/m.npz --tensors"), _read_all("m.npz")),
    ),
    "safetensors": Kind(
        _safetensors,
        ("m.safetensors", "sharded/*"),
        (
            *_commands("inspect @/m.safetensors --tensors", "inspect @/sharded --json"),
            _read_all("m.safetensors"),
            _read_all("sharded"),
        ),
    ),
    "orbax": Kind(
        _orbax,
        ("zarr/*", "zarr/table/*", "zarr/table/.zarray", "ocdbt/*", "ocdbt/d/*", "zarr3/*", "zarr3/d/*"),
        (
            *_commands("inspect @/zarr --tensors"),
            *map(_read_all, ("zarr", "ocdbt", "zarr3")),
        ),
    ),
    "keras": Kind(
        lambda directory: keras_archive(directory / "m.keras"),
        ("m.keras",),
        (*_commands("inspect @/m.keras --tensors"), _read_all("m.keras")),
    ),
    "weights.h5": Kind(
        lambda directory: weights_file(directory / "m.weights.h5"),
        ("m.weights.h5",),
        (_read_all("m.weights.h5"),),
    ),
    "packed.h5": Kind(_packed, ("m.weights.h5",), (_read_all("m.weights.h5"),)),
    "legacy.h5": Kind(_legacy, ("m.h5",), (_read_all("m.h5"),)),
    "weights.json": Kind(_sharded_keras, ("m.weights.json",), (_read_all("m.weights.json"),)),
    "increments": Kind(_log, ("train/increments/**/*",), _INCREMENTAL),
    "published": Kind(_log, ("m/**/*",), _INCREMENTAL),
    "held": Kind(_held_log, ("m/**/hold", "m/**/manifest.json"), _INCREMENTAL),
    "deeprec": Kind(_deeprec, ("train/.incremental_checkpoint/*",), _INCREMENTAL),
    "tables": Kind(
        _tables,
        ("ctr/*", "ctr/*.meta", "ctr/.incremental_checkpoint/*"),
        _commands("inspect @/ctr", "inspect @/ctr/model.ckpt-100.meta", f"{_TABLES} --out @/m"),
    ),
    "table log": Kind(
        _table_log,
        ("train/*", "train/.incremental_checkpoint/*", "m/**/*"),
        (*_INCREMENTAL, *_commands("inspect @/m", "doctor @/m", "diff @/m @/train")),
    ),
    "graph": Kind(
        _graph,
        ("train/*", "signatures.json", "names.txt", "warmup.json"),
        (
            *_commands(
                f"{_MODEL} --out @/second --rename @/names.txt --requests @/warmup.json",
                "inspect @/train/model.ckpt-7.meta",
            ),
            lambda directory: _nothing_left(directory / "second"),
        ),
    ),
    "SavedModel": Kind(
        _graph,
        ("first/7/**/*",),
        _commands("--ckpt-dir @/train --model @/first/7 --out @/b", "inspect @/first/7", "verify @/first"),
    ),
    "store": Kind(
        _store,
        ("bucket/m/head.json", "bucket/m/**/hold", "bucket/m/**/*", "copy/.pushed", "m/.pushed"),
        (_use_store,),
    ),
    "configurations": Kind(_configurations, ("*.config", "token", "golden.json"), (_read_configurations,)),
    "request": Kind(_requests, ("tensor", "*.json"), (_read_tensor, _read_requests)),
}


# --- the campaign ------------------------------------------------------------------------------------------


def make_all(directory: Path) -> None:
    """The files of every kind, undamaged, each in a directory of its own; all of them can be read."""
    for name, kind in KINDS.items():
        (directory / name).mkdir()
        kind.make(directory / name)


def attempt(made: Path, scratch: Path, name: str, seed: int) -> Outcome:
    """Damage a copy of the files of a kind, and read it in a child."""
    kind, rng = KINDS[name], random.Random(f"{name} {seed}")
    directory = scratch / "here"
    _remove(directory)
    shutil.copytree(made / name, directory, symlinks=True)
    files = sorted(
        path
        for pattern in kind.victims
        for path in directory.glob(pattern)
        if path.is_file() and path.stat().st_size
    )
    chosen = rng.sample(files, min(len(files), rng.choice([1, 1, 1, 2])))
    for path in chosen:
        with suppress(FileNotFoundError, PermissionError):  # the one before has moved it
            damage(path, directory, rng)
    began = time.monotonic()
    said, is_good, memory = _in_a_child(lambda: [_guarded(run, directory) for run in kind.runs])
    names = [str(path.relative_to(directory)) for path in chosen]
    return Outcome(seed, name, said, time.monotonic() - began, memory, is_good, names)


DOCUMENTS = {
    "published": ("m/*/manifest.json", "m/deltas/*/*/manifest.json", "m/deltas/*/.state/*.json"),
    "held": ("m/*/manifest.json", "m/deltas/*/hold.json", "m/tags.json"),
    "table log": ("m/*/manifest.json", "m/deltas/*/*/manifest.json"),
    "increments": ("train/increments/*/*.json", "train/increments/*.json"),
    "weights.json": ("m.weights.json",),
    "graph": ("signatures.json", "warmup.json"),
    "store": ("bucket/m/head.json", "bucket/m/*/manifest.json", "copy/.pushed"),
}
"""Kinds with documents, and these: every field of one is replaced by each odd value."""


def fields(made: Path, name: str) -> list[tuple[str, tuple[Any, ...], int]]:
    """Each field of each document of a kind with each odd value: file, keys that lead to it, and a number."""
    found = []
    for path in sorted(each for pattern in DOCUMENTS[name] for each in (made / name).glob(pattern)):
        with suppress(ValueError):
            steps = [*_steps(json.loads(path.read_bytes()))]
            file = str(path.relative_to(made / name))
            found += [(file, each, number) for each in steps for number in range(len(_VALUES))]
    return found


def _steps(value: Any, before: tuple[Any, ...] = ()) -> Any:
    """The keys that lead to each value; of a list the first two stand for all."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, item in items:
        yield (*before, key)
        yield from _steps(item, (*before, key))


def attempt_field(made: Path, scratch: Path, name: str, field_: tuple[str, tuple[Any, ...], int]) -> Outcome:
    """Replace one field of a copy of a kind's files, and read them in a child."""
    file, steps, number = field_
    directory = scratch / "here"
    _remove(directory)
    shutil.copytree(made / name, directory, symlinks=True)
    document = value = json.loads((directory / file).read_bytes())
    for step in steps[:-1]:
        value = value[step]
    value[steps[-1]] = copy.deepcopy(_VALUES[number])
    (directory / file).unlink()  # a hard link's other name keeps what it had
    (directory / file).write_text(json.dumps(document))
    began = time.monotonic()
    said, is_good, memory = _in_a_child(lambda: [_guarded(run, directory) for run in KINDS[name].runs])
    return Outcome(number, name, said, time.monotonic() - began, memory, is_good, [f"{file} {steps}"])


def _remove(directory: Path) -> None:
    for place, names, _ in os.walk(directory):
        for name in names:
            Path(place, name).chmod(0o700, follow_symlinks=True)
    shutil.rmtree(directory, ignore_errors=True)


def _guarded(run: Run, directory: Path) -> None:
    with suppress(ExportError):
        run(directory)


def _in_a_child(work: Callable[[], object]) -> tuple[str, bool, int]:
    """What a fork of this process said, whether it ended well, and how much memory it took more."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _be_the_child(work, writing)
    os.close(writing)
    said = _read_until(reading, time.monotonic() + SECONDS)
    os.close(reading)
    if said is None:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    if said is None:
        return f"no end in {SECONDS:g} s", False, used.ru_maxrss << 10
    code = os.waitstatus_to_exitcode(status)
    return said or f"exit code {code}", code == 0, used.ru_maxrss << 10


def _read_until(descriptor: int, deadline: float) -> str | None:
    pieces = []
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return b"".join(pieces).decode("utf-8", "replace")
        pieces.append(piece)
    return None


def _be_the_child(work: Callable[[], object], writing: int) -> None:
    code = 1
    try:
        os.setsid()
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + MORE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the parent must hear of
        text = str(error) if isinstance(error, Bad) else traceback.format_exc()
        os.write(writing, text.encode("utf-8", "replace")[-_LONGEST_REPORT:])
    finally:
        sys.stdout.flush()
        os._exit(code)
