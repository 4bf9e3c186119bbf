"""Find the code that a builder is made from, and compare it without running it.

`exporter.graph.code_recorder` records it while a builder runs:

- modules below the builder's own directory, or its package's, by their path there;
- all others outside of installed libraries and Python's own by name. They are looked for as Python would: on
  `sys.path`, by an editable installation, else at the place where they were found before;
- files that the builder read (a configuration in JSON or YAML, a file that it executes) by digest;
- installed libraries that these modules import by name and version.

Two files are the same code if they differ only in comments, docstrings and layout, or in statements that run
only when the file is started as a program (`if __name__ == "__main__":`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import BuilderError
from exporter.storage.files import Unchanged, below, read_regular
from exporter.storage.local_paths import quoted
from exporter.while_needed import WhileNeeded
from exporter.wire.json_documents import Sha256, Text, doc

_PARSING = threading.Lock()  # Python 3.11 mixes up the depths of trees that several threads parse


def _in_child() -> None:
    """Replace the lock: a fork has none of the threads that may hold it."""
    global _PARSING
    _PARSING = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


# The directories that this thread has put on the path, while it is in `importable`.
_ADDED: ContextVar[list[str]] = ContextVar("added")


_SAID = "a manifest names the builder's file:"
# Names by which code may give a module attributes that its text does not show.
_MAY_BIND = {"globals", "exec", "eval", "setattr", "vars", "locals", "__getattr__", "__dict__", "modules"}
_bound: Unchanged[tuple[set[str] | None, list[str]]] = Unchanged()


class SourceFile(Struct, frozen=True):
    """A file of a builder."""

    path: Annotated[Text, doc("its path below the directory that all files of the builder share")]
    digest: Annotated[Sha256, doc("SHA-256 of its bytes")]
    code: Annotated[Sha256, doc("a digest of its code, without comments, docstrings and layout")]


class ModuleFile(Struct, frozen=True, omit_defaults=True):
    """A module that a builder uses, which is found by its name."""

    name: Annotated[Text, doc("the name under which it was imported")]
    digest: Annotated[
        Sha256 | None, doc("SHA-256 of its bytes; absent: the program ran other code than the file's")
    ] = None
    code: Annotated[Sha256 | None, doc("a digest of its code, without comments and layout")] = None


class Code(Struct, frozen=True):
    """The code behind a graph; see the module docstring.

    `places` has the file of each of `modules` and `opened`, `beside` its path from the builder's directory.
    Modules in `by_name` were found there by `find_module`, others on a path that the program set itself.
    """

    files: tuple[SourceFile, ...] = ()
    modules: tuple[ModuleFile, ...] = ()
    opened: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Path] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    by_name: frozenset[str] = frozenset()

    def without_files_of(self, directory: Path) -> Code:
        """Return a copy without the opened files below a directory; the files of code stay."""
        top = directory.resolve()
        opened = {n: d for n, d in self.opened.items() if not self.places[n].resolve().is_relative_to(top)}
        return replace(self, opened=opened)


class BuilderFile(Struct, frozen=True):
    """The file of a builder's module."""

    path: Path
    root: Path  # the directory from which its neighbours are imported
    package: str = ""  # its top-level package; "" if the builder was named by its file

    @classmethod
    def of_module(cls, path: Path, name: str) -> BuilderFile:
        """Return the builder file at `path`, which is imported as the module `name`."""
        parts = name.split(".")
        depth = len(parts) if path.name == "__init__.py" else len(parts) - 1
        return cls(path, path.resolve().parents[depth], parts[0])


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Put the working directory first on `sys.path`, as `python -m` does, during the block.

    What `put_first` adds in this thread meanwhile is removed after the block, too.
    """
    added: list[str] = []
    token = _ADDED.set(added)
    try:
        put_first(Path.cwd())
        yield
    finally:
        _ADDED.reset(token)
        for place in added:  # one by one: another thread may have changed the path meanwhile
            with contextlib.suppress(ValueError):
                sys.path.remove(place)


def put_first(directory: Path) -> None:
    """Put a directory first on `sys.path`.

    It is removed at the end of the `importable` block that this thread is in; outside of one it stays.
    """
    _ADDED.get([]).append(str(directory))
    sys.path.insert(0, str(directory))


def file_of(module: object) -> str:
    """Return the `__file__` of a module; "" if it has none, or if the object is not a module."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""


def named_function(model: Any) -> tuple[str, BuilderFile | None]:
    """Return the qualified name of a builder given as a function or object, and the .py file that defines it.

    A `functools.partial` counts as its function, any other object as its class. The file is None if there is
    none, as for code typed at a prompt.
    """
    while isinstance(model, functools.partial):
        model = model.func
    model = model if hasattr(model, "__qualname__") else type(model)
    module = sys.modules.get(model.__module__)
    file = file_of(module)
    if module is None or not file.endswith(".py"):
        return model.__qualname__, None
    path = Path(file)
    if module.__name__ == "__main__":
        return model.__qualname__, BuilderFile(path, path.resolve().parent)
    return model.__qualname__, BuilderFile.of_module(path, module.__name__)


def find_builder(where: str) -> BuilderFile | None:
    """Return the file of `pkg.mod` or `path/file.py`; None if it is not Python source.

    No module is executed; None also if the file cannot be found without that. `sys.path` is changed
    meanwhile.

    Raises:
        BuilderError: the file or top-level module does not exist.
    """
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise BuilderError(
                f"there is no file {where}", hint="name the builder's file: --model path/file.py:fn"
            )
        return BuilderFile(path, path.resolve().parent)
    parts = where.split(".")
    spec: ModuleSpec | None = None
    with importable():
        for end in range(1, len(parts) + 1):  # level by level: `importlib.util.find_spec` would run packages
            places = None if spec is None else [*(spec.submodule_search_locations or ())]
            spec = _find_spec(".".join(parts[:end]), places)
            if spec is None and end == 1 and parts[0] not in sys.modules:
                raise BuilderError(
                    f"importing {where} failed",
                    cause=f"no module named {parts[0]!r} is found from here",
                    hint="run the command where the module can be imported, or name its file: file.py:fn",
                )
            if spec is None:
                return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return BuilderFile.of_module(Path(spec.origin), where)


def _find_spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
            if (spec := finder.find_spec(name, places)) is not None:
                return spec
    return None


def require_function(found: BuilderFile, where: str, name: str) -> None:
    """Raise BuilderError if a builder's module certainly lacks the function `name`, or cannot be parsed.

    `where` is the module as the user named it. Nothing is raised if its code does not show all names: only
    importing it can decide then. The file's names are cached until it changes. CheckpointError if the file is
    a pointer of Git LFS, or cannot be fetched from a store.
    """
    bound, functions = _bound.of(found.path, lambda path: _bound_names(parse(path)))
    if bound is not None and name.split(".")[0] not in bound:
        raise no_function(where, name, functions)


def no_function(where: str, name: str, functions: list[str]) -> BuilderError:
    """Return the error for a builder's module `where` that lacks the function `name`.

    `functions` are those it has.
    """
    import difflib

    nearest = next(iter(difflib.get_close_matches(name, functions, 1)), "FUNCTION")
    return BuilderError(
        f"{where} has no function {name!r}",
        cause=f"its functions are: {', '.join(functions) or 'none'}",
        hint=f"name one that returns inputs and outputs, or a model: --model {quoted(where)}:{nearest}",
    )


def changed_sources(known: Iterable[SourceFile], main: Path) -> list[str]:
    """Return the recorded paths of files whose code changed, or that cannot be read.

    `known` are the recorded files, at least one. `main` is the present path of the first; the others are
    looked up from it. All are returned if the directories above `main` have other names than in its recorded
    path. ManifestError if a path leads out of the directory that the files share, CheckpointError if a file
    is a pointer of Git LFS, or cannot be fetched from a store.
    """
    own, *others = known
    *packages, _ = own.path.split("/")
    present = main.resolve()
    if [*present.parts[len(present.parts) - 1 - len(packages) : -1]] != packages:
        return [file.path for file in known]
    root = present.parents[len(packages)]
    places = [(own, main), *((file, below(root, file.path, _SAID)) for file in others)]
    return [file.path for file, path in places if not _is_same(file, path)]


def code_digest(where: str) -> str | None:
    """Return the digest of the code of the module `pkg.mod` or the file `path/file.py`.

    None if there is no valid Python file. `sys.path` is changed meanwhile. CheckpointError if the file is a
    pointer of Git LFS, or cannot be fetched from a store.
    """
    with contextlib.suppress(BuilderError):
        found = find_builder(where)
        return None if found is None else _code(parse(found.path))
    return None


def _is_same(known: SourceFile | ModuleFile, path: Path) -> bool:
    """True if the file at a path has the known bytes or code; False if it cannot be read.

    CheckpointError if it is a pointer of Git LFS, or cannot be fetched from a store.
    """
    content = content_of(os.fspath(path))
    return content is not None and (
        digest_of(content) == known.digest or code_of(content, path) == known.code
    )


def code_of(content: bytes, path: Path) -> str:
    """Return a digest, in hex, of the code in a Python file's `content`.

    Comments, docstrings and statements `if __name__ == "__main__":` do not count. If `path`, which is not
    read, is not a .py file, or if the code cannot be parsed, the digest is the SHA-256 of the bytes.
    """
    with contextlib.suppress(BuilderError):
        if path.suffix == ".py":
            return _code(parse(path, content))
    return digest_of(content)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of bytes, in lower-case hex."""
    return hashlib.sha256(content).hexdigest()


def digest_at(file: str) -> str:
    """Return the SHA-256, in hex, of a module's file; "" if `content_of` returns None.

    CheckpointError if the file is a pointer of Git LFS, or cannot be fetched from a store.
    """
    content = content_of(file)
    return "" if content is None else digest_of(content)


def content_of(file: str) -> bytes | None:
    """Return the bytes of a module's file, also in a zip archive; None if it cannot be read.

    None also if a .py file has more than 64 MiB, or another file more than 1 GiB. CheckpointError if it is a
    pointer of Git LFS, or cannot be fetched from a store.
    """
    with contextlib.suppress(OSError):
        return read_regular(Path(file), MAX_SOURCE_BYTES if file.endswith(".py") else MAX_COMPILED_BYTES)
    for archive in Path(file).parents:
        if archive.is_file():
            with contextlib.suppress(OSError, ImportError):
                from zipimport import zipimporter  # late: few modules are in archives

                return zipimporter(str(archive)).get_data(file)
            break
    return None


_PARSED = "<parsed>/"
_PARSINGS = 50


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Ignore warnings about files that `parse` reads, in all threads, during the block."""
    ours = ("ignore", None, Warning, re.compile(re.escape(_PARSED)), 0)
    warnings.filters.insert(0, ours)  # type: ignore[attr-defined]  # a list, says the documentation
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


_PARSED_IN_SILENCE = WhileNeeded(_silence)


MAX_SOURCE_BYTES = 64 << 20
MAX_COMPILED_BYTES = 1 << 30


def parse(path: Path, content: bytes | None = None) -> ast.Module:
    """Return the syntax tree of a Python file, or of its `content`.

    BuilderError if it cannot be read or parsed; CheckpointError if it is a pointer of Git LFS, or cannot be
    fetched from a store; SystemError if Python 3.11 fails 51 times. Syntax warnings are not shown; a lock
    lets one thread parse at a time.
    """
    try:
        content = read_regular(path, MAX_SOURCE_BYTES) if content is None else content
        with _PARSED_IN_SILENCE(), _PARSING:
            return _parsed(content, f"{_PARSED}{path.name}")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BuilderError(f"importing {path} failed", cause=f"{type(error).__name__}: {error}") from error


def _parsed(source: bytes, name: str) -> ast.Module:
    """Return the syntax tree of a file's bytes, named `name` in errors; repeated while Python 3.11 fails.

    At most 51 attempts; then SystemError. SyntaxError or ValueError if the bytes are not valid Python.
    """
    # It counts the depth of a tree for all threads together, and raises SystemError if the count is wrong.
    # TensorFlow's AutoGraph parses without our lock.
    for _ in range(_PARSINGS):
        with contextlib.suppress(SystemError):
            return ast.parse(source, name)
    return ast.parse(source, name)


def _code(tree: ast.Module) -> str:
    """Return the SHA-256, in hex, of the code that runs when a module is imported.

    `tree` is changed: it loses its docstrings, and statements `if __name__ == "__main__":`. The digest
    depends on the minor version of Python.
    """
    tree.body = [node for node in tree.body if not _runs_as_program_alone(node)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    # The text of a tree depends on Python's version, so the version is part of the digest.
    text = f"{sys.version_info[0]}.{sys.version_info[1]} {ast.dump(tree)}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _runs_as_program_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"


def _bound_names(tree: ast.Module) -> tuple[set[str] | None, list[str]]:
    """Return the names that a module has after its import, and its functions, sorted.

    (None, []) if its text does not show all names.
    """
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            bound |= {*node.names}
        names = (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
        if _MAY_BIND & {name for name in names if isinstance(name, str)}:
            return None, []
    pending: list[ast.AST] = [*tree.body]
    functions = []
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
                functions += [] if isinstance(node, ast.ClassDef) else [node.name]
                pending += node.decorator_list
                continue
            case ast.Import() | ast.ImportFrom():
                if any(alias.name == "*" for alias in node.names):
                    return None, []
                bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                bound.add(node.id)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.Lambda():
                continue
        pending += ast.iter_child_nodes(node)
    return bound, sorted(functions)


def find_module(name: str, path: list[str]) -> Path | None:
    """Return the file that importing `name` executes with this `sys.path`; None if it is not found.

    No code runs, except that of finders other than Python's own, for a top-level module that is not on the
    path.
    """
    spec: ModuleSpec | None = None
    for number, part in enumerate(name.split(".")):
        places = path if number == 0 else [*((spec and spec.submodule_search_locations) or ())]
        try:
            # only the last name: for a dotted one Python looks for the package among loaded modules
            spec = PathFinder.find_spec(part, places) if places else None
            if spec is None and number == 0:
                spec = _find_otherwise(part)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError):
            return None
        if spec is None:
            return None
    return None if spec is None or not spec.has_location or spec.origin is None else Path(spec.origin)


def _find_otherwise(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module by finders other than Python's, as editable installations have.

    None if no finder has one.
    """
    for finder in sys.meta_path:
        if finder is not PathFinder and getattr(finder, "__module__", "") != "_frozen_importlib":
            with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
                if (spec := finder.find_spec(name, None)) is not None:
                    return spec
    return None


def changed_modules(
    known: Iterable[ModuleFile], find: Callable[[str], Path | None]
) -> tuple[list[str], list[str]]:
    """Return the names of modules whose code changed, and the names of modules that cannot be compared.

    `known` are the recorded modules. A module cannot be compared if its file is not found or cannot be read,
    or if it was recorded without a digest. `find` returns the present file of a module by name, None if there
    is none. CheckpointError if a file is a pointer of Git LFS, or cannot be fetched from a store.
    """
    changed, unknown = [], []
    for module in known:
        path = find(module.name) if module.digest else None
        if path is None or content_of(os.fspath(path)) is None:
            unknown.append(module.name)
        elif not _is_same(module, path):
            changed.append(module.name)
    return changed, unknown


def changed_libraries(known: Mapping[str, str]) -> Iterator[str]:
    """Yield a phrase for each installed library whose version differs from `known`, {name: version}.

    A library that is not installed is skipped. Case, and which of `-`, `_` and `.` is used, do not count.
    """
    if not known:
        return
    installed: dict[str, str] = {}
    for place in sys.path:
        with contextlib.suppress(OSError):
            for entry in Path(place or os.curdir).glob("*.dist-info"):
                name, _, version = entry.stem.partition("-")
                installed.setdefault(_normal(name), version)
    for name, was in known.items():
        now = installed.get(_normal(name), was)
        if _normal(now) != _normal(was):
            yield f"{name} was {was}, is {now}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
