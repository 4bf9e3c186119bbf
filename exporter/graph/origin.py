"""Record the sources of a base besides its checkpoint: the model, its options, its tables' files.

A later delta fits the graph only while these are unchanged. If files alone cannot decide it (a module is not
found, a configuration differs), the graph is built again and compared.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.graph.sources import (
    BuilderFile,
    Code,
    ModuleFile,
    SourceFile,
    changed_modules,
    changed_sources,
    code_digest,
    find_builder,
    find_module,
    named_function,
    require_function,
)
from exporter.storage.files import FileDigests, below, file_digest, require_size
from exporter.storage.layout import SAVED_MODEL_FILE, SAVED_MODEL_TEXT_FILE
from exporter.wire.json_documents import Sha256, Text, doc

if TYPE_CHECKING:
    from exporter.graph.inference_graph import InferenceGraph
    from exporter.graph.source_graph import GraphRequest


def _written(default: Any) -> Any:
    """Return a field with a copy of `default` as its default, which is written into documents, too.

    Earlier releases wrote it; `omit_defaults` leaves out plain defaults, but not a default of a factory.
    """
    return field(default_factory=lambda: copy(default))


class GraphOrigin(Struct, frozen=True, omit_defaults=True, rename={"is_beside": "beside"}):
    """The sources of a graph."""

    function: Annotated[Text, doc("the builder's name; empty for a finished graph")] = _written("")
    is_beside: Annotated[bool, doc("true: found beside the checkpoint, without `--model`")] = _written(False)
    files: Annotated[tuple[SourceFile, ...], doc("the builder's files, first the one in `--model`")] = (
        _written(())
    )
    options: Annotated[dict[Text, Any], doc("the given options about the graph")] = _written({})
    graph: Annotated[Sha256 | Literal[""], doc("a digest of the inference graph")] = _written("")
    assets: Annotated[dict[Text, Sha256], doc("a digest of each table's file, by its name")] = _written({})
    modules: Annotated[tuple[ModuleFile, ...], doc("other modules of the builder, by name")] = ()
    opened: Annotated[dict[Text, Sha256], doc("a digest of each file that the builder read")] = field(
        default_factory=dict
    )
    libraries: Annotated[dict[Text, Text], doc("versions of the installed libraries that it imports")] = (
        field(default_factory=dict)
    )

    @classmethod
    def of(cls, request: GraphRequest, *, is_beside: bool = False) -> GraphOrigin:
        """Return the sources that a request names, before its graph is loaded, so without a builder's code.

        `is_beside` says that the graph is the one beside the checkpoint. A file for which the system raises
        an OSError is left out. A builder's name by file or module is not looked up.

        Raises:
            BuilderError: an archive has only weights, or its config is not JSON.
            CodeRefused: the config of an archive is nested too deeply.
            UsageError: the graph's file does not exist, or the file of `--signatures` cannot be read.
            CheckpointError: a file is damaged, a pointer of Git LFS, or cannot be fetched (subclasses).
            PublishError: what is fetched from a store cannot be written.
        """
        if isinstance(request.model, str) and ":" in request.model and not Path(request.model).exists():
            return cls(request.model.rpartition(":")[2], is_beside, (), graph_options(request))
        function, _, path = _named(request.model)
        files: tuple[SourceFile, ...] = ()
        if path is not None:
            with contextlib.suppress(OSError):  # loading the graph reports the error
                digest = _graph_file_digest(path)
                files = (SourceFile(path.name, digest, digest),)
        return cls(function, is_beside, files, graph_options(request))

    def with_code(self, code: Code) -> GraphOrigin:
        """Return a copy with the code that made the graph; `files` stay the same if `code` has none."""
        return replace(
            self,
            files=code.files or self.files,
            modules=code.modules,
            opened=dict(code.opened),
            libraries=dict(code.libraries),
        )

    def with_graph(self, graph: InferenceGraph, assets: Mapping[str, Path]) -> GraphOrigin:
        """Return a copy with digests of the inference graph and of the files of its tables.

        `assets` are these files by name. OSError if one cannot be read, CheckpointError if it is a pointer of
        Git LFS or cannot be fetched from a store.
        """
        from exporter.graph.graph_digest import graph_digest  # late: a delta reads origins and makes none

        digests = {name: file_digest(path) for name, path in assets.items()}
        return replace(self, graph=graph_digest(graph), assets=digests)

    def differences(self, request: GraphRequest) -> Iterator[str]:
        """Yield a phrase for each difference between a later request's model and options and this origin.

        If the request names no model, models are not compared; if it gives no option, options are not. While
        iterated it raises BuilderError if the builder does not exist or cannot be parsed, UsageError if the
        graph's file does not exist or the file of `--signatures` cannot be read, ManifestError if a recorded
        file is not below its directory, CheckpointError if a file is a pointer of Git LFS, or cannot be
        fetched.
        """
        given = graph_options(request)
        if given:
            for name in sorted(self.options.keys() | given.keys()):
                was, now = self.options.get(name), given.get(name)
                if was != now:
                    yield f"{name} was {was!r}, is {now!r}"
        if request.model is None:
            return
        function, builder, _ = _named(request.model)
        if function != self.function:
            yield f"the builder was {self.function or 'none'}, is {function or 'a finished graph'}"
        elif builder is not None and self.files:
            yield from (f"{name} has changed" for name in changed_sources(self.files, builder.path))

    def code_differences(
        self, request: GraphRequest, places: CodePlaces, digests: FileDigests, known: Mapping[str, str]
    ) -> tuple[list[str], list[str]]:
        """Return the changes of a later request's code, as phrases, and the names of its unknown parts.

        The second list has modules that are not found, or were edited before they were recorded, and files
        that the builder read if they differ. `known` has, by name, digests of such files that made the same
        graph: they are left out. `places` are paths of the last run; `digests` caches digests of files. Both
        lists are empty for a request without a model. BuilderError if the builder does not exist or cannot be
        parsed, UsageError if the graph's file does not exist, ManifestError if a recorded name leads out of
        its directory, CheckpointError if a file is a pointer of Git LFS, or cannot be fetched from a store.
        """
        if request.model is None:
            return [], []
        _, builder, _ = _named(request.model)
        root = Path.cwd() if builder is None else builder.root
        own = [Path(name).parent for name in request.custom_objects if name.endswith(".py")]
        path = [*map(str, (root, *own, Path.cwd())), *sys.path]
        found = {each.name: places.find(each.name, path, builder) for each in self.modules}
        changed, unknown = changed_modules(self.modules, found.get)
        for name, digest in self.opened.items():
            found[name] = place = places.find_opened(name, root, builder)
            with contextlib.suppress(OSError):
                if place is not None and digests(place) == digest:
                    continue
            unknown.append(name)
        unknown = [name for name in unknown if not _is_known(found[name], known.get(name))]
        return [f"{name} has changed" for name in changed], unknown

    def finished_graph(self, request: GraphRequest, digests: FileDigests) -> str | None:
        """Return the digest of the finished graph, a file, that a request names.

        None if the request or this origin has a builder, or no file of a graph. For an archive with an
        unchanged model it is the recorded digest, which releases before 0.3.0 computed in another way.
        `digests` caches digests of files. OSError if the file cannot be read, UsageError if it does not
        exist, BuilderError if a builder does not exist, or an archive has only weights or an invalid config
        (CodeRefused if that is nested too deeply), CheckpointError (and subclasses) if an archive is damaged
        or a file cannot be fetched from a store.
        """
        _, builder, path = _named(request.model)
        if self.function or builder is not None or path is None or not self.files:
            return None
        found, known = digests(path, _graph_file_digest), self.files[0].digest
        return known if found != known and _is_as_written(path, known) else found


def _is_known(place: Path | None, digest: str | None) -> bool:
    with contextlib.suppress(OSError):
        return place is not None and digest is not None and file_digest(place) == digest
    return False


class CodePlaces(Struct, frozen=True):
    """The paths of a builder's modules, and of the files that it read, when it ran; see `Code`.

    `files` are the paths by name, `beside` those relative to the builder's directory, and `by_name` are the
    names of modules that are found through `sys.path` first.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    by_name: frozenset[str] = frozenset()

    @classmethod
    def of(cls, code: Code) -> CodePlaces:
        """Return the places of code that has just run."""
        return cls(code.places, code.beside, code.by_name)

    def find(self, name: str, path: list[str], builder: BuilderFile | None) -> Path | None:
        """Return the present file of a module; None if it is not found.

        It is searched along `path`, at the place of the last run and, as the builder may have moved, beside
        `builder` (None: the builder's file is unknown). A module in `by_name` is searched along `path` first,
        any other one last.
        """
        if name in self.by_name:
            return find_module(name, path) or self._kept(name, builder)
        return self._kept(name, builder) or find_module(name, path)

    def find_opened(self, name: str, root: Path, builder: BuilderFile | None) -> Path | None:
        """Return the present path of a file that the builder read under a name; None if there is none.

        A file without a recorded place is looked for below `root`. ManifestError if the name leads out of
        `root`.
        """
        beside = below(root, name, "a manifest names a file of the builder:")
        return self._kept(name, builder) or (beside if beside.is_file() else None)

    def _kept(self, name: str, builder: BuilderFile | None) -> Path | None:
        places = [self.files[name]] if name in self.files else []
        if builder is not None and name in self.beside:
            starts = dict.fromkeys((builder.path.absolute(), builder.path.resolve()))
            beside = [os.path.normpath(start.parent / self.beside[name]) for start in starts]
            places = [*map(Path, beside), *places]
        return next((place for place in places if place.exists() or _is_in_archive(place)), None)


def _is_in_archive(place: Path) -> bool:
    return any(parent.is_file() for parent in place.parents)


def graph_options(request: GraphRequest) -> dict[str, Any]:
    """Return {option: value} for the options about the graph that the request gives; empty ones are left out.

    `--signatures` has the JSON value of the file, `--custom-objects` {file name or module: digest of its
    code, None if there is no valid Python file}. UsageError if the file of `--signatures` cannot be read,
    CheckpointError if a file is a pointer of Git LFS, or cannot be fetched from a store.
    """
    from exporter.graph.source_graph import read_signatures

    given: dict[str, Any] = {
        "--model-arg": dict(request.model_args),
        "--feed": dict(request.feeds),
        "--absent-key": dict(request.absent_keys),
        "--input": dict(request.inputs),
        "--output": dict(request.outputs),
        "--tag": request.tag,
        "--signatures": None if request.signatures is None else read_signatures(request.signatures),
        "--custom-objects": {Path(name).name: code_digest(name) for name in request.custom_objects},
    }
    return {name: value for name, value in given.items() if value}


def changed_assets(
    known: Mapping[str, str], places: Mapping[str, Path], digests: FileDigests
) -> Iterable[str]:
    """Yield the names of files whose digests changed; files that are missing or raise OSError do not count.

    CheckpointError, while iterated, for a file that cannot be fetched from a store. `known` has the earlier
    digests, `places` the present paths, both by name; `digests` caches digests of files.
    """
    for name, digest in known.items():
        with contextlib.suppress(OSError):
            if name in places and digests(places[name]) != digest:
                yield name


def check_named(model: Any) -> None:
    """Check that the model which `--model` names exists, without running anything.

    None, functions and model objects pass, and so does a builder's function that only importing its module
    could find.

    Raises:
        BuilderError: the builder's file, module or function does not exist, or the file cannot be parsed.
        UsageError: the file of the graph does not exist.
        CheckpointError: the builder's file is a pointer of Git LFS, or cannot be fetched from a store.
    """
    _named(model)


def _named(model: Any) -> tuple[str, BuilderFile | None, Path | None]:
    """Return (builder's function, its file, None), or ("", None, file of the finished graph).

    ("", None, None) for None; the builder's file is None if it cannot be found without running code.
    UsageError if the graph's file does not exist, BuilderError if the builder does not exist or cannot be
    parsed, CheckpointError if its file is a pointer of Git LFS, or cannot be fetched from a store.
    """
    if model is None:
        return "", None, None
    if callable(model):
        return *named_function(model), None
    path = Path(model)
    if path.is_dir():
        pb = path / SAVED_MODEL_FILE
        return "", None, pb if pb.is_file() else path / SAVED_MODEL_TEXT_FILE
    if ":" in model and not path.exists():
        where, _, function = model.rpartition(":")
        builder = find_builder(where)
        if builder is not None:
            require_function(builder, where, function)
        return function, builder, None
    if not path.is_file():
        raise UsageError(
            f"--model {model}: there is no such file", hint="name a builder, a .meta or a SavedModel"
        )
    return "", None, path


def _is_as_written(path: Path, known: str) -> bool:
    """True if `path` is an archive whose model has the digest `known` as releases before 0.3.0 made it.

    BuilderError if an archive has only weights or an invalid config (CodeRefused if that is nested too
    deeply), CheckpointError (and subclasses) if it cannot be read.
    """
    from exporter.checkpoint.families import is_archive

    if not is_archive(path):
        return False
    from exporter.graph.archived_model import model_digest  # late: few deltas are of archives

    return model_digest(path, as_written=True) == known


def _graph_file_digest(path: Path) -> str:
    """Return the digest of a graph's file, or of the model in an archive, without its weights.

    OSError if the file cannot be read, or has more than 2 GiB and is not an archive. BuilderError if an
    archive has only weights or an invalid config (CodeRefused if that is nested too deeply). CheckpointError
    (and subclasses) if an archive is damaged, or a file cannot be fetched from a store.
    """
    from exporter.checkpoint.families import is_archive
    from exporter.wire.protos import MAX_MESSAGE_BYTES

    if not is_archive(path):
        require_size(path, path.stat().st_size, MAX_MESSAGE_BYTES)
        return file_digest(path)
    from exporter.graph.archived_model import model_digest  # late: few deltas are of archives

    return model_digest(path)
