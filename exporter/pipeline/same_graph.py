"""Check that the graph and its tables' files are still those from which the base was made.

<model>/deltas/<log>/.state/sources.json     paths of these files, and digests that need not be computed again

Paths of a trainer's files are kept beside the publications, not in them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.families import model_beside
from exporter.errors import (
    CheckpointError,
    ExportError,
    GraphError,
    PublishError,
    SchemaChanged,
    UsageError,
)
from exporter.graph.origin import CodePlaces, GraphOrigin, changed_assets
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import changed_libraries
from exporter.options import ExportRequest, Verify
from exporter.publish.delta_log import DeltaLog
from exporter.storage.files import FileDigests, make_directories, read_record, replace_file
from exporter.storage.layout import ASSETS_DIRECTORY, CACHES_DIRECTORY, SOURCES_FILE
from exporter.storage.local_paths import quoted
from exporter.wire.protos import Proto

_MAX_BYTES = 64 << 20  # a path and a digest for each source and asset


class SourceFiles(Struct):
    """Paths and digests of the files behind a log's graph; losing them costs time, or a note.

    `places` has the path of each asset's file. `graph` is the digest of a finished graph's file that differs
    from the base's, but was found to have the same inference graph. `archives` are the digests of the newest
    checkpoint's files, if it is not a tensor bundle. `code` has the paths of the builder's modules, and
    `same` the digests of those that were found to make the same graph although they differ.
    """

    places: Mapping[str, Path] = field(default_factory=dict)
    graph: str = ""
    digests: FileDigests = field(default_factory=FileDigests)
    archives: FileDigests = field(default_factory=FileDigests)
    code: CodePlaces = CodePlaces()
    same: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, log: Path) -> SourceFiles:
        """Read the record beside a log, by its directory; empty if there is none, or it is damaged."""
        # Whatever JSON may be in the file, of other types or nested too deeply for the parser.
        with suppress(OSError, ValueError, KeyError, AttributeError, RecursionError):
            found = json.loads(read_record(log / SOURCES_FILE, _MAX_BYTES))
            places = {str(name): Path(str(path)) for name, path in found["places"].items()}
            digests, archives = (FileDigests.from_json(found.get(key, {})) for key in ("digests", "archives"))
            code = found.get("code", {})
            modules = {str(name): Path(str(path)) for name, path in code.get("places", {}).items()}
            beside = {str(name): str(path) for name, path in code.get("beside", {}).items()}
            where = CodePlaces(modules, beside, frozenset(map(str, code.get("by_name", ()))))
            same = {str(name): str(digest) for name, digest in code.get("same", {}).items()}
            return cls(places, str(found["graph"]), digests, archives, where, same)
        return cls()

    def save(self, log: Path) -> None:
        """Write the record beside a log, by its directory, in place of the previous one.

        A failure to write it is ignored.
        """
        document: dict[str, Any] = {
            "places": {name: str(path.absolute()) for name, path in self.places.items()},
            "graph": self.graph,
            "digests": self.digests.to_json(),
        }
        if self.archives.known:
            document["archives"] = self.archives.to_json()
        if self.code.files or self.same:
            document["code"] = {
                "places": {name: str(path) for name, path in self.code.files.items()},
                "beside": dict(self.code.beside),
                "by_name": sorted(self.code.by_name),
                "same": dict(self.same),
            }
        with suppress(OSError, PublishError):
            make_directories(log / CACHES_DIRECTORY)
            replace_file(log / SOURCES_FILE, json.dumps(document).encode())


class SameGraph(Struct, frozen=True):
    """The result of a comparison in words, `said`, and the record to save once a delta is published."""

    said: str = ""
    files: SourceFiles | None = None

    def save(self, log: Path) -> None:
        """Write the new record, if there is one, beside a log; a failure to write it is ignored."""
        if self.files is not None:
            self.files.save(log)


def check_same_graph(
    log: DeltaLog, request: ExportRequest, catalog: Catalog, before: SourceFiles
) -> SameGraph:
    """Compare the request's graph and its tables' files with the base's; return the result in words.

    `catalog` is the checkpoint, beside which the graph may be. `before` is the record of the base's files, as
    read beside the log; the result has the new record, to be saved once a delta is published. If the base
    does not record its sources, nothing is compared, and no difference is an error.

    Raises:
        SchemaChanged: the graph or a file differs.
        UsageError: outputs are to be verified, or the graph is to be checked and its source is not known.
        ManifestError: the base's record of its files has a path outside its directory.
        GraphError, CheckpointError, TensorFlowNeeded, OSError: the graph has to be built for the comparison,
            and cannot be.
    """
    if request.verify is Verify.OUTPUTS:
        raise UsageError(
            "--verify outputs compares a whole model, a delta has no answers of its own",
            hint="give --verify files or bytes; compare values by "
            f"export-model diff {quoted(log.model)} {quoted(request.ckpt_dir)}",
        )
    origin = log.base.entry.origin
    is_beside = origin is not None and origin.is_beside
    asked = GraphRequest.of(request, model_beside(catalog.prefix) if is_beside else None, catalog.naming)
    differences = [*(origin or GraphOrigin()).differences(asked)]
    if origin is None and request.check_graph:
        raise UsageError(
            f"--verify graph: what base {log.base.at.position} was made from is not known",
            hint="publish a base that remembers it: the same export with --new-base always, once",
        )
    if origin is None:
        return SameGraph(f"of base {log.base.at.position}; what it was made from is not known")
    if request.check_graph and not differences:
        return _check_built(log, origin, asked)
    return _check_files(log, origin, asked, before, differences)


def _check_files(
    log: DeltaLog, origin: GraphOrigin, asked: GraphRequest, before: SourceFiles, differences: list[str]
) -> SameGraph:
    """Compare the files of a graph and of its tables; build it if files differ that its code only read.

    `origin` is the base's record of its graph, `asked` the requested graph, `before` the record of files
    beside the log. `differences` lists differences of options, as texts. Raises SchemaChanged for any
    difference, UsageError if a Python file is named without its function; GraphError, CheckpointError,
    TensorFlowNeeded or OSError if the graph cannot be built.
    """
    base = f"of base {log.base.at.position}"
    files, more = _source_files(log, origin, asked, before)
    differences = [*differences, *more]
    changed, unknown = origin.code_differences(asked, before.code, files.digests, before.same)
    differences += changed
    differences += [f"{n} has changed" for n in changed_assets(origin.assets, files.places, files.digests)]
    said = "as it was, as far as its own files tell" if asked.model is not None else "no model is named"
    if unknown and not differences:
        if {*unknown} & {*origin.opened} or not callable(asked.model):
            files, differences = _compare_built(log, origin, asked, files)
            said = f"built again, because of {', '.join(unknown)}, and the same"
        else:  # the running program may have loaded them before they changed
            said = f"{said}; not compared: {', '.join(unknown)}"
    if differences:
        _require_meant(asked)
        raise _mismatch(base, differences)
    missing = [n for n in origin.assets if not (n in files.places and files.places[n].is_file())]
    said = f"{base}; {said}" + (f"; not found: {', '.join(missing)}" if missing else "")
    if asked.model is not None:
        said = "; ".join([said, *changed_libraries(origin.libraries)])
    is_new = files.digests.is_new or files.archives.is_new or files.graph != before.graph
    return SameGraph(said, files if is_new or files.same != before.same else None)


def _check_built(log: DeltaLog, origin: GraphOrigin, asked: GraphRequest) -> SameGraph:
    """Build the graph again, by the builder and TensorFlow, and compare all of it with the base's.

    `asked` is the requested graph, `origin` the base's record of its graph. Raises SchemaChanged if it
    differs, UsageError if no model is named, GraphError, CheckpointError, TensorFlowNeeded or OSError if it
    cannot be built.
    """
    if asked.model is None:
        raise UsageError("--verify graph: nothing says what to build", hint="name the model again: --model")
    base = f"of base {log.base.at.position}"
    _, differences = _compare_built(log, origin, asked, SourceFiles())
    if differences:
        raise _mismatch(base, differences)
    return SameGraph(f"{base}; built again, and the same")


def _require_meant(asked: GraphRequest) -> None:
    """Raise UsageError if the model of `asked` is a Python file without its function.

    A new base would not help then.
    """
    from exporter.graph.load import require_function_named  # late: most deltas compare and find no difference

    if isinstance(asked.model, str):
        require_function_named(Path(asked.model))


def _mismatch(base: str, differences: list[str]) -> SchemaChanged:
    """Return the error for a graph or files with these differences; `base` is a phrase like "of base 7"."""
    return SchemaChanged(
        f"the graph or its files are not those {base}",
        cause="; ".join(dict.fromkeys(differences)),
        hint="publish a new base: the same export with --new-base if-needed",
    )


def _source_files(
    log: DeltaLog, origin: GraphOrigin, asked: GraphRequest, before: SourceFiles
) -> tuple[SourceFiles, list[str]]:
    """Return the record of the requested graph's files, and the differences of a finished graph, as texts.

    `origin` is the base's record of its graph, `asked` the requested graph, `before` the record of files
    beside the log. A finished graph is a file or directory, not a builder; of a builder, and of the base's
    own graph, the list is []. A file that the operating system refuses to read is a difference, too.

    Raises:
        UsageError: the graph's file does not exist.
        BuilderError: the builder does not exist, or cannot be parsed.
        CheckpointError, CodeRefused: a model's archive is damaged, or needs code.
        TensorFlowNeeded: the graph cannot be read without TensorFlow, which is not installed.
    """
    try:
        digest = origin.finished_graph(asked, before.digests)
    except OSError as error:
        return before, [f"{asked.model} cannot be read: {error.strerror}"]
    if digest is None:
        return before, []
    if digest not in (origin.files[0].digest, before.graph):
        return _compare_finished(log, origin, asked, replace(before, graph=digest))
    directory = Path(str(asked.model))
    if not directory.is_dir():
        return before, []
    # A SavedModel contains its files, whatever the directory of the base's SavedModel was called.
    names = {name: before.places.get(name, Path(name)).name for name in origin.assets}
    places = {name: directory / ASSETS_DIRECTORY / file for name, file in names.items()}
    return replace(before, places=places), []


def _compare_finished(
    log: DeltaLog, origin: GraphOrigin, asked: GraphRequest, files: SourceFiles
) -> tuple[SourceFiles, list[str]]:
    """Compare a finished graph whose bytes differ from the base's, but which may be the same inference graph.

    `origin` is the base's record of its graph, `asked` the requested graph, `files` the record so far.
    Returns the record with its files, and the differences as texts; [] if there are none. A graph that cannot
    be loaded is a difference. Raises TensorFlowNeeded for a model that an archive describes, if TensorFlow is
    not installed.
    """
    try:
        return _compare_built(log, origin, asked, files)
    except (GraphError, CheckpointError, UsageError) as error:
        return files, [f"{asked.model} is another graph: {error.message}"]
    except OSError as error:
        return files, [f"a file of {asked.model} cannot be read: {error.strerror}"]


def _compare_built(
    log: DeltaLog, origin: GraphOrigin, asked: GraphRequest, files: SourceFiles
) -> tuple[SourceFiles, list[str]]:
    """Load the requested inference graph; return the record with its files, and differences from the base.

    `origin` is the base's record of its graph, `asked` the requested graph, `files` the record of files so
    far. The differences, of the graph or its files, are texts; [] if there are none. A builder runs. Raises
    UsageError, GraphError, CheckpointError, TensorFlowNeeded or OSError if the graph cannot be loaded.
    """
    from exporter.graph.load import clean, load_source

    with tempfile.TemporaryDirectory() as scratch:
        source = load_source(_completed(asked, origin.options, Path(scratch)))
        graph = clean(source)
    places = {asset.file_name: asset.source for asset in graph.assets}
    now = GraphOrigin().with_graph(graph, places)
    different = []
    if now.graph != origin.graph:
        what = "an operation, a constant or a vocabulary"
        if lookups := _other_vocabularies(log, graph.meta_graph.graph_def):
            what = f"the vocabulary of {', '.join(lookups)}"
        different.append(f"{asked.model} holds another inference graph: {what} differs")
    different += [f"{name} has changed" for name, was in origin.assets.items() if now.assets.get(name) != was]
    code = source.code
    same = {each.name: each.digest for each in code.modules if each.digest} | dict(code.opened)
    return replace(files, places=places, code=CodePlaces.of(code), same=same), different


def _other_vocabularies(log: DeltaLog, graph_def: Proto) -> list[str]:
    """Return the names of lookups whose vocabulary differs from the base's; [] if its graph is unreadable."""
    from exporter.graph.graph_files import read_saved_model
    from exporter.graph.lookup_tables import differing_lookups

    with suppress(ExportError, OSError):
        base = read_saved_model(log.base.path).meta_graphs
        return differing_lookups(base[0].graph_def, graph_def) if base else []
    return []


def _completed(asked: GraphRequest, options: Mapping[str, Any], scratch: Path) -> GraphRequest:
    """Return the request `asked`, completed by the base's options that it does not give itself.

    The base's signatures are written to a file in `scratch`, which the result names; OSError if it cannot be
    written.
    """
    signatures = asked.signatures
    if signatures is None and "--signatures" in options:
        signatures = scratch / "signatures.json"
        signatures.write_text(json.dumps(options["--signatures"]))
    return replace(
        asked,
        inputs=asked.inputs or options.get("--input", {}),
        outputs=asked.outputs or options.get("--output", {}),
        model_args=asked.model_args or options.get("--model-arg", {}),
        feeds=asked.feeds or options.get("--feed", {}),
        absent_keys=asked.absent_keys or options.get("--absent-key", {}),
        tag=asked.tag or options.get("--tag"),
        signatures=signatures,
    )
