"""Check the names in a Keras archive's config before Keras makes and calls these objects.

Allowed are the names in `harmless_names.txt`, and those that the user named (`--custom-objects`) or that the
running program registered with Keras. The rest is refused.

Keras looks names up in several ways: below the module in an entry, in its public API, in tables of its own,
in the module that reads the entry. All of them stay within Keras if an entry has no module but Keras' own and
no second name (`registered_name`), so that the name decides. Source: `_retrieve_class_or_fn` in
saving/serialization_lib.py, and saving/legacy/serialization.py of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from exporter.errors import CodeRefused
from exporter.graph.outside import effect_of
from exporter.wire import protos


def _sections() -> dict[str, frozenset[str]]:
    """Read `harmless_names.txt`; return {section without its brackets: the names listed in it}."""
    found, section = defaultdict[str, frozenset[str]](frozenset), ""
    for line in Path(__file__).with_name("harmless_names.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            found[section] |= {*line.split()}
    return {**found}


_NAMES = _sections()
CLASSES, FUNCTIONS = _NAMES["classes"], _NAMES["functions"]
RAGGED_MAKERS, TENSOR_MEMBERS = _NAMES["ragged makers"], _NAMES["tensor members"]
GRAPH_FUNCTIONS = frozenset(
    f"{space}.{name}".removeprefix("tf.")
    for space, names in _NAMES.items()
    for name in (names if space == "tf" or space.startswith("tf.") else ())
)
KERASES = frozenset({"keras", "tf_keras"})
_CARRIES_CODE = {
    "Lambda": "byte code in the archive",
    "__lambda__": "byte code in the archive",
    "TorchModuleWrapper": "a pickled module in the archive",
    "JaxLayer": "pickled functions in the archive",
    "FlaxLayer": "pickled functions in the archive",
    "TFSMLayer": "a SavedModel in another place",
}
_DEFINE_IT = "name what defines it: --custom-objects pkg.mod, or path/file.py"
_MAX_DEPTH = 200  # Python's stack ends at 1,000 calls

Entry = dict[str, Any]


def refuse_code(path: Path, config: Any, known: Mapping[str, Any], keras: Any) -> None:
    """Raise CodeRefused if a config names a class or function that is not known to be harmless.

    Harmless are the names in `harmless_names.txt`, in `known` (the objects that the user named, by name), and
    those registered with Keras. A layer that carries code, or calls something that is not in that file, is
    refused unless it is known. A config that is nested more than 200 deep is refused, too. `path` is the
    archive, for messages; `config` is its config, parsed from JSON; `keras` is the Keras module that will
    read it.
    """
    for place, entry in entries(config):
        if not is_known(entry, known, keras):
            _require_listed(path, place or "/", entry)


def _require_listed(path: Path, place: str, entry: Entry) -> None:
    """Raise CodeRefused for an entry that is not in `harmless_names.txt`, or that brings or calls other code.

    An entry calls other code if its config names a function or operation that the file does not list. `path`
    is the archive and `place` the entry's path in its config, both for the message alone.
    """
    name = str(entry["class_name"])
    if name in _CARRIES_CODE:
        raise CodeRefused(f"{path} asks to run {_CARRIES_CODE[name]}: {name} at {place}")
    if name in _CALLS:
        config = entry.get("config")
        if (called := _CALLS[name](config if isinstance(config, dict) else {})) is not None:
            raise CodeRefused(
                f"{path} asks to call {called} at {place}, which may do more than add nodes to a graph"
            )
    elif _is_listed(entry):
        return
    elif _is_of_keras(entry):
        raise CodeRefused(
            f"{path} asks for {_full_name(entry)} at {place}, which is not known to be harmless",
            hint=f"{_DEFINE_IT}; or trust it: --allow code",
        )
    else:
        raise CodeRefused(
            f"{path} asks for {_full_name(entry)} at {place}, which is not Keras' own",
            hint=_DEFINE_IT,
        )


def is_known(entry: Entry, known: Mapping[str, Any], keras: Any) -> bool:
    """True if `known`, or Keras' registry, has the class or function that Keras finds for an entry.

    `entry` is an object of a config with a "class_name", `known` the objects that the user named, by name.
    Objects in `known` that Keras itself defines do not count, nor does a name that belongs to another class
    than the entry's.
    """
    kind = entry["class_name"]
    name = entry.get("config") if kind == "function" else entry.get("registered_name", kind)
    if not isinstance(name, str):
        return False
    found = known.get(name)
    if str(getattr(found, "__module__", "")).partition(".")[0] in KERASES:  # imported by the user's module
        found = None
    found = found or keras.saving.get_registered_object(name)
    # A registered name counts only if it belongs to the entry's class, by which legacy files are read.
    return found is not None and kind in (name, "function", getattr(found, "__name__", None))


def entries(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Entry]]:
    """Yield (place, object) for every object in a config that has a "class_name", outer ones first.

    `value` is the config, parsed from JSON. A place is the path of keys and list positions to the object,
    each after a slash; it is "" for `value` itself. `place` and `depth` are those of `value` and are passed
    in recursion only. CodeRefused, during the iteration, if it is nested more than 200 deep.
    """
    if depth > _MAX_DEPTH:
        raise CodeRefused(f"the config is nested more than {_MAX_DEPTH} deep at {place[:99]}")
    if isinstance(value, dict):
        if "class_name" in value:
            yield place, value
        for key, child in value.items():
            yield from entries(child, f"{place}/{key}", depth + 1)
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from entries(child, f"{place}/{number}", depth + 1)


def _is_listed(entry: Entry) -> bool:
    name = entry["class_name"]
    if name == "TypeSpec":  # of a legacy file
        return str(entry.get("type_spec")).removeprefix("tf.") in _NAMES["type specs"]
    if name == "__typespec__":
        top = str(entry.get("module")).partition(".")[0]
        return entry.get("spec_name") in _NAMES["type specs"] and top == "tensorflow"
    if isinstance(name, str) and name in _NAMES["plain values"]:
        return True
    if not _is_of_keras(entry):
        return False
    if name == "function":
        return isinstance(function := entry.get("config"), str) and function in FUNCTIONS
    return isinstance(name, str) and name in CLASSES


def _is_of_keras(entry: Entry) -> bool:
    """True if Keras looks up an entry's class or function only among its own objects.

    Then its "module" is absent, `builtins` or Keras', and its "registered_name" is absent or repeats its
    name.
    """
    module, name = entry.get("module"), entry["class_name"]
    own = (None, name, entry.get("config") if name == "function" else name)
    is_own_module = module in (None, "builtins") or str(module).partition(".")[0] in KERASES
    return is_own_module and entry.get("registered_name") in own


def _full_name(entry: Entry) -> str:
    name = entry.get("config") if entry["class_name"] == "function" else entry["class_name"]
    owner = entry.get("module") or entry.get("registered_name")
    return f"{owner}.{name}" if owner else str(name)


# --- what Keras 2 applies to tensors -----------------------------------------------------------------------


def _function(config: Entry) -> str | None:
    """Return `tf.<name>` of the function that a layer calls; None if it is listed as harmless.

    `config` is the config of a TFOpLambda or SlicingOpLambda, which has the name under "function".
    """
    name = config.get("function")
    if isinstance(name, str) and (name in GRAPH_FUNCTIONS or _name_of_today(name) in GRAPH_FUNCTIONS):
        return None
    return f"tf.{name}"


def _name_of_today(name: str) -> str | None:
    """Return the canonical name, in the installed TensorFlow or Keras, of the function with this name.

    Neither name begins with `tf.`; a function that only TensorFlow 1 has gets a name that begins with
    `compat.v1.`. None if there is no such function.
    """
    from tensorflow.python.util import tf_export

    if (symbol := tf_export.get_symbol_from_name(name)) is None:
        return None
    for api in ("tensorflow", "keras"):
        found = tf_export.get_canonical_name_for_symbol(symbol, api, add_prefix_to_v1_names=True)
        if found is not None:
            return str(found)
    return None


def _class_method(config: Entry) -> str | None:
    """Return `tf.<class>.<method>` of the class method that a layer calls; None if it is listed as harmless.

    `config` is the config of a ClassMethod, with the names under "cls_symbol" and "method_name".
    """
    owner, name = config.get("cls_symbol"), config.get("method_name")
    is_listed = owner == "RaggedTensor" and name in RAGGED_MAKERS
    return None if is_listed else f"tf.{owner}.{name}"


def _member(config: Entry) -> str | None:
    """Return `<name> of a tensor` for the property or method that a layer uses; None if it is listed.

    `config` is the config of an InstanceProperty or InstanceMethod, with the name under "attr_name".
    """
    name = config.get("attr_name")
    return None if name in TENSOR_MEMBERS else f"{name} of a tensor"


def _operation(config: Entry) -> str | None:
    """Return a phrase for the operation of a layer's NodeDef; None if it is harmless and calls no function.

    `config` is the config of a TensorFlowOpLayer, with the NodeDef under "node_def", as a JSON object or as
    serialized text. The phrase is `the operation <op>`, or `an operation that cannot be read` for a NodeDef
    that cannot be parsed.
    """
    text = config.get("node_def")
    try:
        if isinstance(text, dict):
            node = json_format.ParseDict(text, protos.NodeDef())
        else:
            node = protos.NodeDef.FromString(str(text).encode())
    except (json_format.ParseError, DecodeError):
        return "an operation that cannot be read"
    calls = any(value.HasField("func") or value.list.func for value in node.attr.values())
    return f"the operation {node.op}" if calls or effect_of(node.op) is not None else None


# Layers that call what their config names, each with a function to name it; None if it is listed.
_CALLS: dict[str, Callable[[Entry], str | None]] = {
    "TFOpLambda": _function,
    "SlicingOpLambda": _function,
    "ClassMethod": _class_method,
    "InstanceProperty": _member,
    "InstanceMethod": _member,
    "TensorFlowOpLayer": _operation,
}
