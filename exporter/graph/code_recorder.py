"""Import a builder's code, and record its files while it is imported and runs.

`recording` records each module that this thread executes, and each file that a user's code opens. Together
with the modules that these import, or hold values of, they are the builder's `Code`.

Not recorded: files that a library opens by itself, and values that a program sets in a module at run time.

A long-running process (a watch) may load a model again after its files were edited. Python would return the
modules that it has loaded, so a builder's are forgotten first.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from exporter.errors import BuilderError, ExportError
from exporter.graph.sources import (
    BuilderFile,
    Code,
    ModuleFile,
    SourceFile,
    code_of,
    content_of,
    digest_at,
    digest_of,
    file_of,
    find_builder,
    find_module,
    parse,
    put_first,
)
from exporter.storage.files import file_digest
from exporter.while_needed import WhileNeeded

_imported: dict[str, str] = {}  # {file: its digest when this process executed it for a builder}
_INSTALLED = {"site-packages", "dist-packages"}
_MOST_OPENED_BYTES = 16 << 20  # of a file that a builder opens: configurations are small, larger files data
_IMPORTING = threading.RLock()  # one builder at a time: modules of two that have one name are not mixed up


def _in_child() -> None:
    """Replace the lock of imports after a fork: the child has none of the threads that may hold it."""
    global _IMPORTING
    _IMPORTING = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def import_code(where: str) -> Any:
    """Import and return the module `pkg.mod`, or the file `path/file.py` as a module.

    If a file of any builder was edited since its import, all modules of builders are removed from
    `sys.modules` first, and so imported anew. Modules of other builders are removed, too, if the directory of
    this one has modules of their names. The directory of a file is put first on `sys.path`, until the
    `importable` block around the call ends, if any. Waits while another thread imports a builder. Raises
    whatever the import raises: ImportError, FileNotFoundError, or an error of the module's own code;
    CheckpointError if a builder's file is now a pointer of Git LFS.
    """
    with _IMPORTING:
        with contextlib.suppress(BuilderError):  # the import will report the error
            if (found := find_builder(where)) is not None:
                _forget_namesakes(found.root)
        _forget_edited()
        with recording() as recorder:
            module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
            recorder.modules.append(module)
    return module


def _forget_edited() -> None:
    """Remove all modules of builders from `sys.modules` if the file of one was edited since its import.

    CheckpointError if a file is now a pointer of Git LFS.
    """
    # Modules that were imported before this process loaded a builder belong to the program, and stay.
    if all(digest_at(file) == digest for file, digest in _imported.items()):
        return
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and file_of(module) in _imported:
            _forget_module(name)
    _imported.clear()
    importlib.invalidate_caches()


def _forget_namesakes(root: Path) -> None:
    """Remove modules of other builders from `sys.modules` if the directory `root` has modules of their names.

    `root` is the directory of the next builder. A module that a builder imported from elsewhere is removed if
    `root` has a directory or .py file of its top-level name; all others stay.
    """
    for name, module in [*sys.modules.items()]:
        if (file := file_of(module)) not in _imported or Path(file).resolve().is_relative_to(root):
            continue
        top = root / name.partition(".")[0]
        if top.is_dir() or top.with_suffix(".py").is_file():
            _forget_module(name)


def _forget_module(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], child, None) is module:
        delattr(sys.modules[parent], child)  # `from pkg import mod` would find it there


def _import_file(path: Path) -> Any:
    """Import a file as a module, in `sys.modules`, with its directory first on the path, and return it.

    The module has the file's name without `.py`, or `builder_<name>` if a module of the program has that
    name. FileNotFoundError if there is no such file, ImportError if it is not a Python file; also whatever
    its code raises, after which the module stays in `sys.modules`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    put_first(path.parent.resolve())
    name = path.stem if _is_free_name(path.stem, path) else f"builder_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


_OURS = {"exporter", "serving"}


def _is_free_name(name: str, path: Path) -> bool:
    """True if importing the file `path` as module `name` replaces no module that others may use.

    Such are this program's packages and all loaded modules, except those that builders imported and the one
    loaded from `path` itself.
    """
    file = file_of(sys.modules.get(name))
    is_builders = file in _imported or (file != "" and Path(file).resolve() == path.resolve())
    return name not in _OURS and (name not in sys.modules or is_builders)


class Recorder:
    """Records the modules that this thread executes, and files it opens, while a builder is loaded."""

    def __init__(self) -> None:
        self.modules: list[ModuleType] = []
        self.opened: dict[str, bool] = {}  # {file: whether a user's code opened it, not a library}
        self._path = [*sys.path]

    def note(self, module: ModuleType) -> None:
        """Record a user's module, with the digest of its file, right before the module is executed.

        Does nothing for other modules. CheckpointError if the file is a pointer of Git LFS.
        """
        if (file := file_of(module)) and is_users(file):
            _imported[file] = digest_at(file)
            self.modules.append(module)

    def code(self, model: object, main: BuilderFile | None, *, is_loaded: bool) -> Code:
        """Return the code behind a graph that `model` (a function, a model or a text) made.

        `main` is the builder's own file, None if it has none. With `is_loaded` this process imported the
        builder to make the graph: then BuilderError if a file was edited meanwhile. Modules that otherwise
        differ from their files have no digest. Opened files that cannot be read are left out. CheckpointError
        if a module's file is a pointer of Git LFS.
        """
        found = _Reached(main)
        found.follow([*self.modules, *_modules_of_builder(model)])
        root = Path.cwd() if main is None else main.root
        path = [*map(str, dict.fromkeys((root, Path.cwd()))), *self._path]
        own: SourceFile | None = None
        files: list[SourceFile] = []
        modules: list[ModuleFile] = []
        places: dict[str, Path] = {}
        by_name = set[str]()
        for file, module in found.users.items():
            real, name = Path(file).resolve(), _name_of(module)
            known = _digests(module, file, real)
            if is_loaded and not known and file in _imported:
                raise BuilderError(
                    f"{name} ({file}) was edited while it was used", hint="run the command again"
                )
            if main is not None and known and real == main.path.resolve():
                own = SourceFile(real.relative_to(main.root).as_posix(), *known)
            elif main is not None and known and real in _places_of(main.root, name):
                files.append(SourceFile(real.relative_to(main.root).as_posix(), *known))
            else:
                while name in places:  # two files that were loaded by hand under one name
                    name += "#"
                modules.append(ModuleFile(name, *known))
                places[name] = Path(file).absolute()
                if (there := find_module(name, path)) is not None and there.resolve() == real:
                    by_name.add(name)
        if own is None:  # a path below the root means nothing without the builder's own file
            modules += [ModuleFile(_module_at(each.path), each.digest, each.code) for each in files]
            places |= {_module_at(each.path): root / each.path for each in files}
            files = []
        else:
            files = [own, *sorted(files, key=lambda each: each.path)]
        opened = {}
        for name, place in self._opened(root, {*map(os.path.realpath, found.users)}):
            with contextlib.suppress(OSError, ExportError):
                opened[name] = file_digest(place)
                places[name] = place
        return Code(
            tuple(files),
            tuple(sorted(modules, key=lambda each: each.name)),
            opened,
            _distributions(found.libraries),
            places,
            {} if main is None else {name: _beside(main.path, place) for name, place in places.items()},
            frozenset(by_name),
        )

    def _opened(self, root: Path, modules: set[str]) -> Iterator[tuple[str, Path]]:
        """Yield (name, absolute path) of each opened file that belongs to the builder's code.

        Modules' own files, given by their resolved paths in `modules`, do not, nor do files above 16 MiB and
        files of Python, libraries or this program. Of the files that libraries opened, only those below
        `root` count, without hidden ones (a part of the path begins with a dot). The name is the path below
        `root`, or for a file elsewhere the shortest end of its path that is free. Files that cannot be read
        are left out.
        """
        names = set[str]()
        for file, is_by_user in self.opened.items():
            path = Path(file)
            with contextlib.suppress(OSError):
                real = path.resolve()
                size = path.stat().st_size if path.is_file() else _MOST_OPENED_BYTES + 1
                if str(real) in modules or size > _MOST_OPENED_BYTES or not is_users(str(real)):
                    continue
                below_root = real.relative_to(root).as_posix() if real.is_relative_to(root) else ""
                if not is_by_user and (not below_root or "/." in f"/{below_root}"):
                    continue  # a library's own file, or its cache; those of the builder's are configurations
                ends = ("/".join(path.parts[-count:]) for count in range(1, len(path.parts)))
                name = below_root or next((end for end in ends if end not in names), "")
                if name and name not in names:
                    names.add(name)
                    yield name, path.absolute()


def _beside(builder: Path, place: Path) -> str:
    """Return the relative path from the directory of the file `builder` to `place`.

    Of the two paths, with links left and with links resolved, it is the one with fewer `..`; the first if
    both have as many.
    """
    ways = ((builder.absolute(), place), (builder.resolve(), place.resolve()))
    return min((os.path.relpath(to, start.parent) for start, to in ways), key=lambda way: way.count(".."))


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Yield a recorder of the modules and files that this thread uses in the block.

    A nested block yields the recorder of the outer one. Python's functions that import modules and open files
    are replaced, for all threads, until the last block of any thread ends.
    """
    if (outer := _RECORDER.get()) is not None:
        yield outer
        return
    recorder = Recorder()
    token = _RECORDER.set(recorder)
    try:
        with _NOTED():
            yield recorder
    finally:
        _RECORDER.reset(token)


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Replace the functions that import modules and open files so that recorders note their use.

    The old functions are put back at the end of the block. A use is noted by the recorder of the thread that
    it happens in, if there is one.
    """
    import builtins
    import io
    from zipimport import zipimporter

    machinery = importlib.machinery
    loaders: tuple[Any, ...] = (
        machinery.SourceFileLoader,
        machinery.SourcelessFileLoader,
        machinery.ExtensionFileLoader,
        zipimporter,
    )
    changes: list[tuple[Any, str, Any]] = [
        *((loader, "exec_module", _noting_module(loader.exec_module)) for loader in loaders),
        (importlib, "import_module", _noting_name(importlib.import_module)),
        (builtins, "open", _noting_file(builtins.open)),
        (io, "open", _noting_file(io.open)),
        (io, "open_code", _noting_file(io.open_code)),
    ]
    if (file_io := sys.modules.get("tensorflow.python.lib.io.file_io")) is not None:
        changes.append((file_io.FileIO, "__init__", _noting_gfile(file_io.FileIO.__init__)))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, changed in changes:
        setattr(owner, name, changed)
    try:
        yield
    finally:
        for owner, name, was in before:
            if was is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, was)


_NOTED = WhileNeeded(_noted)


def _noting_module(before: Callable[[Any, ModuleType], None]) -> Callable[[Any, ModuleType], None]:
    def exec_module(self: Any, module: ModuleType) -> None:
        if (recorder := _RECORDER.get()) is not None:
            recorder.note(module)
        before(self, module)

    return exec_module


def _noting_name(before: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    @functools.wraps(before)
    def import_module(*args: Any, **kwargs: Any) -> ModuleType:
        module = before(*args, **kwargs)
        if (recorder := _RECORDER.get()) is not None and is_users(file_of(module)):
            recorder.modules.append(module)
        return module

    return import_module


def _noting_file(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def opens(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = before(file, *args, **kwargs)
        _note_opened(file, kwargs.get("mode", args[0] if args else "r"))
        return opened

    return opens


def _noting_gfile(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def __init__(self: Any, name: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> None:
        before(self, name, mode, *args, **kwargs)
        _note_opened(name, mode)

    return __init__


def _note_opened(file: object, mode: object) -> None:
    """Record a file opened for reading, and whether a user's code opened it, also by Python's own library.

    Does nothing if no recorder is set, `file` is a descriptor, `mode` allows writing, or an import opens the
    file.
    """
    recorder = _RECORDER.get()
    if recorder is None or not isinstance(file, str | bytes | os.PathLike) or {*str(mode)} & {*"wax+"}:
        return
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and the one that replaces `open`
        frame = frame and frame.f_back
    while frame is not None and (file_name := frame.f_code.co_filename).endswith(_GFILE) | _is_pythons(
        file_name
    ):
        if frame.f_globals.get("__name__", "").startswith("importlib"):
            return
        frame = frame.f_back
    path = str(Path(os.fsdecode(file)).absolute())
    is_by_user = frame is not None and is_users(frame.f_code.co_filename)
    recorder.opened[path] = recorder.opened.get(path, False) or is_by_user


_GFILE = "tensorflow/python/platform/gfile.py"


class _Reached:
    """The users' modules that some modules import or hold values of, and the libraries that these import."""

    def __init__(self, main: BuilderFile | None) -> None:
        self.users: dict[str, ModuleType] = {}  # by file
        self.libraries: set[str] = set()  # by the name that is imported, without what follows a dot
        self._main = main

    def follow(self, modules: Iterable[ModuleType]) -> None:
        """Add the users' modules and libraries among `modules`, and all modules behind users' modules.

        Behind a user's module are the modules that it imports or holds values of. CheckpointError if one's
        file is a pointer of Git LFS.
        """
        pending = [*modules]
        while pending:
            module = pending.pop()
            file = file_of(module)
            if not file or file in self.users or _name_of(module).startswith("__autograph_generated"):
                continue
            if is_users(file) or self._is_builders(file):
                self.users[file] = module
                pending += _led_to(module, file)
            elif not _is_pythons(file) and not _is_ours(file):
                self.libraries.add(_name_of(module).partition(".")[0])

    def _is_builders(self, file: str) -> bool:
        """True for the builder's own file and the files of its package, even if the package is installed.

        False if the builder is in no package.
        """
        if self._main is None or not self._main.package:
            return False
        path = Path(file).resolve()
        return path == self._main.path.resolve() or path.is_relative_to(self._main.root / self._main.package)


def _led_to(module: ModuleType, file: str) -> Iterator[ModuleType]:
    """Yield the loaded modules behind a module: its imports, its packages, and the modules of its values.

    `file` is the module's file, whose import statements are read unless it cannot be parsed. A module's
    values are all objects that it holds under a name. CheckpointError, during the iteration, if the file is a
    pointer of Git LFS.
    """
    name = _name_of(module)
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    package = vars(module).get("__package__") or (
        name if hasattr(module, "__path__") else ".".join(parts[:-1])
    )
    content = content_of(file) if file.endswith(".py") else None
    if content is not None:
        with contextlib.suppress(BuilderError):
            names += _imports(parse(Path(file), content), package)
    yield from (sys.modules[name] for name in names if isinstance(sys.modules.get(name), ModuleType))
    for value in [*vars(module).values()]:
        # Python sets a package's modules as its attributes, whoever imports them.
        if not isinstance(value, ModuleType) or not _name_of(value).startswith(f"{name}."):
            yield from _modules_of(value)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names that import statements anywhere in a module may import, each after its packages.

    `package` is the module's own package, for relative imports. A name may be the name of a function or
    class.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            found = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in found:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _modules_of(value: object, *, inside: bool = True) -> Iterator[ModuleType]:
    """Yield `value` itself if it is a module, else the loaded module that its `__module__` names, if any.

    With `inside`, also the modules of the items of a collection (of a dict its values): of the first 1,000,
    one level deep.
    """
    if isinstance(value, ModuleType):
        yield value
        return
    try:
        name = getattr(value, "__module__", None)
    except Exception:  # noqa: BLE001 - a proxy of a missing object
        return
    module = sys.modules.get(name) if isinstance(name, str) else None
    if isinstance(module, ModuleType):
        yield module
    if inside and isinstance(value, dict | list | tuple | set | frozenset):
        for item in [*(value.values() if isinstance(value, dict) else value)][:_MOST_ITEMS]:
            yield from _modules_of(item, inside=False)


_MOST_ITEMS = 1000  # of a registry of layers; longer ones are data


def _modules_of_builder(model: object) -> Iterator[ModuleType]:
    """Yield the loaded modules that a builder's code comes from; none if it is given as text (`pkg.mod:fn`).

    For a function these are its own module, the modules of values that it names, and of a partial's
    arguments; for a model the modules of its classes and of its layers' classes. A module may be yielded
    several times.
    """
    if isinstance(model, str):
        return
    while isinstance(model, functools.partial):
        yield from _modules_of([*model.args, *model.keywords.values()])
        model = model.func
    for layer in (model, *(getattr(model, "layers", None) or ())):
        for kind in type(layer).__mro__:
            yield from _modules_of(kind)
    if not isinstance(function := inspect.unwrap(model) if callable(model) else model, FunctionType):
        return
    module = sys.modules.get(function.__module__)
    if module is not None and file_of(module):
        yield module
    used: list[object] = [cell.cell_contents for cell in function.__closure__ or () if _has_contents(cell)]
    for code in _inside(function.__code__):  # in a notebook: the values that the function names
        used += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for value in used:
        yield from _modules_of(value)


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _inside(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, then all code objects in its constants, at any depth."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inside(constant)


def _digests(module: ModuleType, file: str, real: Path) -> tuple[str, ...]:
    """Return (digest of a module's file, digest of its code); () if the file is not the imported one.

    () also if the file cannot be read. `real` is the file's resolved path. CheckpointError if the file is a
    pointer of Git LFS.
    """
    content = content_of(file)
    if content is None or not _is_as_imported(module, file, content):
        return ()
    return digest_of(content), code_of(content, real)


def _is_as_imported(module: ModuleType, file: str, content: bytes) -> bool:
    """True if a module was imported from `content`, the present bytes of its file.

    The digest of a builder's module is known. Of any other module the functions and plain constants are
    compared with the file's; a module without source is assumed to be the same.
    """
    if file in _imported:
        return _imported[file] == digest_of(content)
    if not file.endswith(".py"):
        return True
    try:
        stored = {*_inside(compile(content, file, "exec", dont_inherit=True))}
        tree = parse(Path(file), content)
    except (SyntaxError, ValueError, BuilderError):
        return False
    name = vars(module).get("__name__")
    is_own = True
    for value in [*vars(module).values()]:
        members = [*vars(value).values()] if isinstance(value, type) and value.__module__ == name else [value]
        for member in members:
            code = getattr(member, "__code__", None)
            if isinstance(member, FunctionType) and member.__module__ == name and isinstance(code, CodeType):
                is_own &= code.co_filename != file or code in stored
    return is_own and all(vars(module).get(key, value) == value for key, value in _constants(tree))


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield (name, literal) for each name that a module sets once, to a literal, on its first level."""
    assigned = [
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and assigned.count(target.id) == 1:
                    yield target.id, node.value.value


def _name_of(module: ModuleType) -> str:
    """Return the name by which other programs import a module.

    For `__main__` that is the name of its spec, else of its file without the suffix.
    """
    name = str(vars(module).get("__name__"))
    if name != "__main__":
        return name
    spec = vars(module).get("__spec__")
    return Path(file_of(module)).stem if spec is None else str(spec.name)


def _places_of(root: Path, name: str) -> tuple[Path, Path]:
    """Return the two files below `root` that a module may be in: `<name>.py`, then `<name>/__init__.py`."""
    place = root.joinpath(*name.split("."))
    return place.with_name(f"{place.name}.py"), place / "__init__.py"


def _module_at(path: str) -> str:
    """Return the name of the module with this path, which is relative to its root and has slashes."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def _pythons() -> tuple[str, ...]:
    import sysconfig

    found = sysconfig.get_paths()
    return tuple({os.path.realpath(found[name]) + os.sep for name in ("stdlib", "platstdlib")})


@functools.cache
def _ours() -> tuple[str, ...]:
    top = Path(os.path.realpath(__file__)).parents[2]
    return tuple(f"{top / name}{os.sep}" for name in _OURS)


@functools.cache
def _is_installation(directory: str) -> bool:
    """True if a directory has a `.dist-info`, which installers write; False if unreadable. Memoised."""
    try:
        return any(each.suffix == ".dist-info" for each in Path(directory).iterdir())
    except OSError:
        return False


def _is_installed(file: str) -> bool:
    if _INSTALLED & {*Path(file).parts}:
        return True
    return any(
        file.startswith(place.rstrip(os.sep) + os.sep)
        for place in [*sys.path]
        if place and _is_installation(place)
    )


def _is_pythons(file: str) -> bool:
    """True for a file of Python's own library, and for code that is frozen into the interpreter."""
    return file.startswith("<frozen ") or (
        os.path.realpath(file).startswith(_pythons()) and not _is_installed(file)
    )


def _is_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_ours())


def is_users(file: str) -> bool:
    """True for a file of a user: not one of Python, an installed library, this program or the kernel.

    False for code without a file.
    """
    is_other = file.startswith(("<", "/proc/", "/sys/", "/dev/")) or not file
    return not (is_other or _is_installed(file) or _is_pythons(file) or _is_ours(file))


def _distributions(libraries: Iterable[str]) -> dict[str, str]:
    """Return {distribution: its version}, sorted, of libraries given by the names that are imported.

    Libraries of no installed distribution are left out.
    """
    from importlib.metadata import packages_distributions, version

    known = packages_distributions()
    names = {distribution for library in libraries for distribution in known.get(library, ())}
    return {name: version(name) for name in sorted(names)}
