"""The Python files that a builder is made from: find and compare them without running them, and import them.

They are the builder's own module and the modules beside it that it imports, directly or through others: files
under the directory of `path/file.py`, modules of the package that `pkg.mod` is in. Modules that are installed
elsewhere, or imported by a computed name, are not followed.

Two files are the same code if they differ only in comments, docstrings and layout, or in statements that run
only when the file is started as a program (`if __name__ == "__main__":`).

A long-running process (a watch) may load a model again after its files were edited. Python would return the
modules that it has loaded, so a builder's are forgotten first.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct

from exporter.errors import BuilderError
from exporter.storage.files import Unchanged, below, file_digest, read_regular
from exporter.storage.local_paths import quoted
from exporter.while_needed import WhileNeeded
from exporter.wire.json_documents import Sha256, Text, doc

_imported: dict[Path, str] = {}  # {file: its digest when this process imported it for a user}
_IMPORTING = threading.RLock()  # one builder at a time: modules of two that have one name are not mixed up
_PARSING = threading.Lock()  # Python 3.11 takes the depth of another thread's tree for its own


def _in_child() -> None:
    """Replace the locks: a fork has none of the threads that may hold them."""
    global _IMPORTING, _PARSING
    _IMPORTING, _PARSING = threading.RLock(), threading.Lock()


os.register_at_fork(after_in_child=_in_child)

# The places that this thread has put on the path, while it is in `importable`.
_ADDED: ContextVar[list[str]] = ContextVar("added")


def import_code(where: str) -> Any:
    """The module `pkg.mod`, or the file `path/file.py` as one, imported anew if its files were edited."""
    with _IMPORTING:
        with contextlib.suppress(BuilderError):  # the import says what is wrong
            if (found := find_builder(where)) is not None:
                files = {found.root / file.path: file.digest for file in read_sources(found)}
                _forget_namesakes(found.root, files)
                _forget_edited(files)
        return _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)


def code_behind(model: object) -> tuple[SourceFile, ...]:
    """The present files of the builder `pkg.mod:fn` or `path/file.py:fn`; none for any other model."""
    if not isinstance(model, str):
        return ()
    with contextlib.suppress(BuilderError):
        found = find_builder(model.rpartition(":")[0])
        return () if found is None else read_sources(found)
    return ()


def _forget_edited(files: dict[Path, str]) -> None:
    """Forget the modules of `files` ({file: digest}) if one of them was edited since it was imported."""
    # Modules that were imported before this process loaded a builder belong to the program, and stay.
    if any(_imported.get(path, digest) != digest for path, digest in files.items()):
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if name != "__main__" and file is not None and Path(file).resolve() in files:
                _forget_module(name)
        importlib.invalidate_caches()
    _imported.update(files)


def _forget_namesakes(root: Path, files: Iterable[Path]) -> None:
    """Forget modules that another builder imported from its own directory, under the names of these files."""
    for path in files:
        *packages, last = path.relative_to(root).with_suffix("").parts
        name = ".".join(packages if last == "__init__" else (*packages, last))
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is not None and (own := Path(found).resolve()) != path and own in _imported:
            _forget_module(name)


def _forget_module(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], child, None) is module:
        delattr(sys.modules[parent], child)  # `from pkg import mod` would find it there


def _import_file(path: Path) -> Any:
    """A file as a module, with its directory first on the path.

    FileNotFoundError, or ImportError, if it is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    _put_first(path.parent.resolve())
    name = path.stem if _may_take(path.stem, path) else f"builder_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


_OURS = {"exporter", "serving"}


def _may_take(name: str, path: Path) -> bool:
    """True unless the program has another module of this name, or one of ours has it, imported or not."""
    file = getattr(sys.modules.get(name), "__file__", None)
    is_builders = file is not None and Path(file).resolve() in {path.resolve(), *_imported}
    return name not in _OURS and (name not in sys.modules or is_builders)


_SAID = "a manifest names the builder's file:"
_INSTALLED = {"site-packages", "dist-packages"}
# Names by which code may give a module attributes that its text does not show.
_MAY_BIND = {"globals", "exec", "eval", "setattr", "vars", "locals", "__getattr__", "__dict__", "modules"}
_bound: Unchanged[tuple[set[str] | None, list[str]]] = Unchanged()


class SourceFile(Struct, frozen=True):
    """A file of a builder."""

    path: Annotated[Text, doc("below the directory that all files of the builder share")]
    digest: Annotated[Sha256, doc("SHA-256 of its bytes")]
    code: Annotated[Sha256, doc("a digest of what they mean to Python")]


class BuilderFile(Struct, frozen=True):
    """The file of a builder's module."""

    path: Path
    root: Path  # the directory that imports of its neighbours start from
    package: str = ""  # its top-level package; empty for a file that is named by its path

    @classmethod
    def of_module(cls, path: Path, name: str) -> BuilderFile:
        """The file of the module that is imported as `name`."""
        parts = name.split(".")
        depth = len(parts) if path.name == "__init__.py" else len(parts) - 1
        return cls(path, path.resolve().parents[depth], parts[0])


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Put the working directory first on the path, as `python -m` does, while user code is imported."""
    added: list[str] = []
    token = _ADDED.set(added)
    try:
        _put_first(Path.cwd())
        yield
    finally:
        _ADDED.reset(token)
        for place in added:  # not the path as it was: another thread may have added its own meanwhile
            with contextlib.suppress(ValueError):
                sys.path.remove(place)


def _put_first(directory: Path) -> None:
    """Put a directory first on the path; the `importable` that this thread is in takes it away again."""
    _ADDED.get([]).append(str(directory))
    sys.path.insert(0, str(directory))


def find_builder(where: str) -> BuilderFile | None:
    """The file of `pkg.mod` or `path/file.py`; None if it cannot be found without running code.

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
    """Raise BuilderError for a function that a builder's module certainly lacks.

    An import decides about doubtful names.
    """
    bound, functions = _bound.of(found.path, lambda path: _bound_names(_parse(path)))
    if bound is not None and name.split(".")[0] not in bound:
        raise no_function(where, name, functions)


def no_function(where: str, name: str, functions: list[str]) -> BuilderError:
    """The error for a builder's module that lacks the named function."""
    import difflib

    nearest = next(iter(difflib.get_close_matches(name, functions, 1)), "FUNCTION")
    return BuilderError(
        f"{where} has no function {name!r}",
        cause=f"its functions are: {', '.join(functions) or 'none'}",
        hint=f"name one that returns inputs and outputs, or a model: --model {quoted(where)}:{nearest}",
    )


def read_sources(main: BuilderFile) -> tuple[SourceFile, ...]:
    """A builder's own file, then by path every file beside it that it imports, directly or not.

    BuilderError if its own file cannot be parsed; others that cannot, and what they import, are left out.
    """
    own = main.path.resolve()
    found = {own: _source(own, main.root, _parse(main.path))}
    pending = [own]
    while pending:
        path = pending.pop()
        with contextlib.suppress(BuilderError):  # a neighbour that is broken may never be imported
            for neighbour in _neighbours(path, main):
                if neighbour not in found:
                    found[neighbour] = _source(neighbour, main.root, _parse(neighbour))
                    pending.append(neighbour)
    first, *rest = found.values()
    return (first, *sorted(rest, key=lambda file: file.path))


def changed_sources(known: Iterable[SourceFile], main: Path) -> list[str]:
    """The paths of `known` files whose code changed, or that are gone; `main` is the present first one."""
    own, *others = known
    *packages, _ = own.path.split("/")
    present = main.resolve()
    if [*present.parts[len(present.parts) - 1 - len(packages) : -1]] != packages:
        return [file.path for file in known]
    root = present.parents[len(packages)]
    places = [(own, main), *((file, below(root, file.path, _SAID)) for file in others)]
    return [file.path for file, path in places if not _is_same(file, path)]


def code_digest(where: str) -> str | None:
    """The digest of the code of `pkg.mod` or `path/file.py`.

    None if the file is not found, or is no Python.
    """
    with contextlib.suppress(BuilderError):
        found = find_builder(where)
        return None if found is None else _code(_parse(found.path))
    return None


def _is_same(file: SourceFile, path: Path) -> bool:
    try:
        if file_digest(path) == file.digest:
            return True
        return _code(_parse(path)) == file.code
    except (OSError, BuilderError):
        return False


def _source(path: Path, root: Path, tree: ast.Module) -> SourceFile:
    return SourceFile(path.relative_to(root).as_posix(), file_digest(path), _code(tree))


_PARSED = "<parsed>/"
_PARSINGS = 50


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Ignore warnings of the files that are parsed here; other threads have the same filters."""
    ours = ("ignore", None, Warning, re.compile(re.escape(_PARSED)), 0)
    warnings.filters.insert(0, ours)  # type: ignore[attr-defined]  # a list, says the documentation
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


_PARSED_IN_SILENCE = WhileNeeded(_silence)


MAX_SOURCE_BYTES = 64 << 20


def _parse(path: Path) -> ast.Module:
    """The syntax tree of a file, or BuilderError; nobody is warned of its syntax."""
    try:
        with _PARSED_IN_SILENCE(), _PARSING:
            return _parsed(read_regular(path, MAX_SOURCE_BYTES), f"{_PARSED}{path.name}")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BuilderError(f"importing {path} failed", cause=f"{type(error).__name__}: {error}") from error


def _parsed(source: bytes, name: str) -> ast.Module:
    """The syntax tree of a file's bytes, parsed as often as other threads make Python 3.11 fail."""
    # It counts the depth of a tree for all threads together, and raises SystemError where that is off.
    # TensorFlow's AutoGraph parses without our lock.
    for _ in range(_PARSINGS):
        with contextlib.suppress(SystemError):
            return ast.parse(source, name)
    return ast.parse(source, name)


def _code(tree: ast.Module) -> str:
    """The digest of the code that runs when a module is imported; `tree` loses its docstrings."""
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


def _neighbours(path: Path, main: BuilderFile) -> Iterator[Path]:
    """Yield the files beside the builder that a module of it, the file `path`, imports."""
    for node in ast.walk(_parse(path)):
        names: list[str] = []
        base = main.root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            if node.level:
                base = path.parents[node.level - 1]
        for name in names:
            if base is main.root and main.package and name.split(".")[0] != main.package:
                continue
            yield from _files(base, name, main.root)


def _files(base: Path, name: str, root: Path) -> Iterator[Path]:
    """Yield the existing files of a module below `base`, its packages' first; none outside of `root`."""
    if not base.is_relative_to(root):
        return
    parts = [part for part in name.split(".") if part]
    if not parts:
        candidates = [base / "__init__.py"]
    else:
        packages = [base.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
        candidates = [*packages, base.joinpath(*parts).with_suffix(".py")]
    for candidate in candidates:
        if candidate.is_file():
            found = candidate.resolve()
            inside = found.relative_to(root).parts if found.is_relative_to(root) else (*_INSTALLED,)
            if not _INSTALLED & {*inside}:
                yield found


def _bound_names(tree: ast.Module) -> tuple[set[str] | None, list[str]]:
    """The names that a module has after its import (None: its text does not show all), and its functions."""
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
