"""The options of an export as values, for the command line and for Python; each is declared once.

A field that is annotated with an `Option` is an option of each command that takes the field's struct. From
that declaration come its parameter, help and completion (`exporter.terminal.parameters`), its line in
docs/reference, its part in a plan's digest, and the argument that says the same to another process.
"""
# Annotations are values here, not texts: to evaluate texts took 5 ms of each command.

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import NODEFAULT, Struct, field
from msgspec.structs import FieldInfo, fields, force_setattr, replace

from exporter.errors import UsageError
from exporter.newer_python import StrEnum
from exporter.options import given
from exporter.options.given import Checked, Given, StrPath
from exporter.options.words import (
    Fields,
    Part,
    count,
    fields_of,
    name_of,
    number,
    require_needed,
    texts_of,
    wrong_word,
)
from exporter.storage.local_paths import checkpoint_path, local_name, local_path
from exporter.storage.url import Url

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exporter.options.keywords import ExportKeywords, JobsKeywords, UpdatesKeywords


class Option(Struct, frozen=True):
    """An option of the command line, with all that a field's type and default do not express."""

    help: str
    heading: str | None = None
    """Its heading in `--help`."""
    name: str = ""
    """`--name`; empty: the field's own name."""
    letter: str = ""
    """`-n`, a short name."""
    metavar: str | None = None
    words: Mapping[str, str] = {}
    """What may be typed, with its meaning, which `--help` and completion list: `code`, or `files=DIR`."""
    least: float | None = None
    """The smallest number that is accepted."""
    default: str = ""
    """What `--help` shows as the default, if that is not its value."""
    typed: Any = None
    """The type of what is typed, if it is not the field's."""
    parse: Callable[[str, Any], Any] | None = None
    """Makes the field's value of the option's name and what is typed: a text, or all of a repeated option."""
    text: Callable[[Any], Any] = str
    """What is typed for a value: the other way round; of an option with `fields` several texts."""
    fields: tuple[str, ...] = ()
    """The fields of its struct that it sets, if they are not its own alone: `parse` returns `Fields`."""
    parts: Mapping[str, Part] = {}
    """The field of each of its words, if `in_parts` made it."""
    goes_with: str = ""
    """Options without one of which it has no effect, and is refused: `--incr or --new-base`; or an option
    with its value: `--verify outputs`.
    """
    digest: Literal["", "always", "if given"] = ""
    """Whether it is part of a plan's digest: it decides what a version is, and shows neither in its graph nor
    in its tensors. `always` is for what was part of it in the first release; a new option is `if given`,
    so that what was published before it is recognised.
    """

    def __repr__(self) -> str:
        return "Option(...)"  # signatures show it in each annotation; the docstring has the texts

    @property
    def lines(self) -> str:
        """The help text, and a line for each word."""
        return "\n".join([self.help, *(f"{word}: {meaning}" for word, meaning in self.words.items())])

    @property
    def told(self) -> str:
        """The help text with the meaning of each word, as one paragraph."""
        words = "; ".join(f"{word} ({meaning})" for word, meaning in self.words.items())
        return f"{self.help} {words}." if words else self.help

    def of_fields(self) -> dict[str, str]:
        """Return the help text of each field that the option's words set, by field; {} without parts.

        A text is the option's help and the meanings of the words that set the field.
        """
        said: dict[str, list[str]] = {}
        for word, part in self.parts.items():
            is_value = part.take is None and part.value is not True
            said.setdefault(part.field, []).append(f"{word} ({part.meaning})" if is_value else part.meaning)
        head = self.help.removesuffix("; repeatable:")
        return {name: f"{head}: {'; '.join(texts)}." for name, texts in said.items()}

    def require_word(self, name: str, text: str) -> None:
        """Refuse a text that is not one of the option's words; `name` is the option's, for the error.

        A word such as `files=DIR` needs a value after `=`, any other word may not have one.

        Raises:
            UsageError: the text is no such word; the hint has the nearest word, or all.
        """
        heads = {word.partition("=")[0]: word for word in self.words}
        head, equals, value = text.partition("=")
        if not (head in heads and bool(value) == ("=" in heads[head]) and bool(equals) == bool(value)):
            raise wrong_word(self.words, name, text)


def in_parts(parts: Mapping[str, Part], help: str, **settings: Any) -> Option:
    """Return a repeatable option of which each word sets a field of the option's struct.

    `parts` has the fields by word, `help` the help text without `; repeatable:`, which is added. `settings`
    are other fields of `Option`.
    """
    return Option(
        f"{help}; repeatable:",
        typed=tuple[str, ...],
        words={word: part.meaning for word, part in parts.items()},
        parts=parts,
        parse=partial(fields_of, parts),
        text=partial(texts_of, parts),
        fields=tuple(dict.fromkeys(part.field for part in parts.values())),
        **settings,
    )


class DeclaredOption(Struct, frozen=True):
    """An option where it is declared: at the end of `path`, from field to field."""

    name: str
    """`--name`."""
    path: tuple[str, ...]
    option: Option
    type: Any
    default: Any

    def value(self, values: Any) -> Any:
        """Return the option's value in `values`, a struct; the default if a struct on the path is None.

        Of an option that sets several fields, the value is `Fields` with those that are not as by default.
        """
        if not self.option.fields:
            return self.own(values)
        for name in self.path[:-1]:
            if (values := getattr(values, name)) is None:
                return self.default
        plain = {each.name: each for each in fields(type(values))}
        found = ((name, getattr(values, name)) for name in self.option.fields)
        return Fields({name: value for name, value in found if value != default_of(plain[name])})

    def own(self, values: Any) -> Any:
        """Return the value of the field that declares the option, in `values`, a struct.

        The default if a struct on the path is None.
        """
        for name in self.path:
            values = getattr(values, name, self.default)
        return values

    def is_given(self, values: Any) -> bool:
        """True if the option's value in `values`, a struct, is not the default."""
        return bool(self.value(values) != self.default)


@cache
def declared(kind: type[Struct]) -> tuple[DeclaredOption, ...]:
    """Return the options that a type of structs, or a struct in one of its fields, declares, in their order.

    The result is cached. The first call also adds the options' words to `given.FIELDS`.
    """
    return tuple(_declared(kind))


def default_of(each: FieldInfo) -> Any:
    """Return the default value of a struct's field; msgspec's NODEFAULT if it has none."""
    return each.default_factory() if each.default_factory is not NODEFAULT else each.default


def _declared(kind: type[Struct]) -> Iterator[DeclaredOption]:
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        option = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Option)), None)
        default = default_of(each)
        if option is not None:
            name = option.name or f"--{each.name.replace('_', '-')}"
            default = Fields() if option.fields else default
            for word, part in option.parts.items():
                if part.take is not None or part.value is True:
                    given.FIELDS[name, word.partition("=")[0]] = part.field
            yield DeclaredOption(name, (each.name,), option, get_args(hint)[0], default)
        elif (inner := struct_in(hint)) is not None:
            yield from (replace(one, path=(each.name, *one.path)) for one in declared(inner))


def struct_in(hint: Any) -> type[Struct] | None:
    """Return the struct type in the type `hint` of a field, alone or in a union; None if it has none."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((one for one in members if isinstance(one, type) and issubclass(one, Struct)), None)


def option_of(kind: type[Struct], name: str) -> str:
    """Return the name, in messages, of the option that sets a field: `--keep`, or with a word `--add stamp`.

    The word is there if exactly one word of the option sets the field. KeyError if the struct has no option
    for it.
    """
    for one in declared(kind):
        words = [word for word, part in one.option.parts.items() if part.field == name]
        if words or one.path[-1] == name:
            return name_of(one.name, words[0]) if len(words) == 1 else one.name
    raise KeyError(name)


def arguments(values: Struct) -> Iterator[str]:
    """Yield the command line's arguments for a struct's values: each option that is not as by default.

    An option and its value are one argument, `--name=value`, so that a value may begin with a dash.
    """
    for one in declared(type(values)):
        if not one.is_given(values):
            continue
        match one.value(values):
            case bool():
                yield one.name
            case Fields() as found:
                yield from (f"{one.name}={text}" for text in one.option.text(found))
            case Mapping() as pairs:
                yield from (f"{one.name}={name}={text}" for name, text in pairs.items())
            case tuple() as several:
                yield from (f"{one.name}={each}" for each in several)
            case value:
                yield f"{one.name}={one.option.text(value)}"


def digest_fields(values: Struct) -> dict[str, Any]:
    """Return the values of options that are part of a plan's digest, by field.

    The values of a struct in a field are a dictionary, or None for a field that is None. An option that is
    part of it `if given` is left out if it is as by default.
    """
    told: dict[str, Any] = {}
    for one in declared(type(values)):
        asked = {each.field: each.digest for each in one.option.parts.values()} or {
            one.path[-1]: one.option.digest
        }
        if not any(asked.values()):
            continue
        part, owner = told, values
        for name in one.path[:-1]:
            if (owner := getattr(owner, name)) is None:
                part[name] = None
                break
            part = part.setdefault(name, {})
        else:
            plain = {each.name: default_of(each) for each in fields(type(owner))}
            found = {name: getattr(owner, name) for name, when in asked.items() if when}
            part |= {
                name: value
                for name, value in found.items()
                if asked[name] == "always" or value != plain[name]
            }
    return told


def require_company(given: Iterable[Struct]) -> None:
    """Refuse options that have no effect without others; `given` are all structs of a command or a request.

    Raises:
        UsageError: such an option is set, and none of the options with which it goes (`goes_with`).
    """
    found = [(one, one.value(values)) for values in given for one in declared(type(values))]
    alone = list(lacking_company(found))
    if not alone:
        return
    needs = alone[0].option.goes_with
    *others, last = (one.name for one in alone if one.option.goes_with == needs)
    names = f"{', '.join(others)} and {last}" if others else last
    goes = "go" if others else "goes"
    raise UsageError(f"{names} {goes} with {needs}", hint=f"add {needs}, or leave out {names}")


def lacking_company(found: Sequence[tuple[DeclaredOption, Any]]) -> Iterator[DeclaredOption]:
    """Yield the options that have a value but lack each option with which they go (`goes_with`).

    `found` has all options, with their values. An option is not yielded if one with which it goes is missing
    from `found`.
    """
    known = {one.name for one, _ in found}
    given = {one.name: one.option.text(value) for one, value in found if value != one.default}
    texts = ((name, [text] if isinstance(text, str) else text) for name, text in given.items())
    there = {*given, *(f"{name} {each}" for name, several in texts for each in several)}
    for one, _ in found:
        company = one.option.goes_with.split(" or ") if one.option.goes_with else []
        is_known = bool(company) and all(text.partition(" ")[0] in known for text in company)
        if one.name in given and is_known and not there.intersection(company):
            yield one


def _take_within_limits(values: Struct, own: Collection[str] = ()) -> None:
    """Convert the values of a struct's fields, in place, to the fields' types, and check their limits.

    Fields in `own` are not converted.

    Raises:
        UsageError: a value does not fit its field, is below the option's least, or is not one of its words.
    """
    given.take(values, own)
    for one in declared(type(values)):
        if one.option.least is not None and len(one.path) == 1:
            value = one.value(values)
            # not `value < least`, which lets NaN pass
            if value is not None and not value >= one.option.least:
                raise given.wrong(one.path[0], value, f"{one.option.least:g} or more")
        if one.option.parts and len(one.path) == 1:
            _require_parts(one, values)
        if one.option.words and one.option.parse is None and len(one.path) == 1:
            for text in one.value(values):
                one.option.require_word(one.name, text)


def _require_parts(one: DeclaredOption, values: Struct) -> None:
    parts = one.option.parts
    for part in parts.values():
        value = getattr(values, part.field)
        # not `value < least`, which lets NaN pass
        if part.least is not None and value is not None and not value >= part.least:
            raise given.wrong(part.field, value, f"{part.least:g} or more")
    require_needed(parts, one.name, one.value(values))


class _Limited(Given, frozen=True):
    """Options that a Python program gives, within their limits."""

    def _take(self) -> None:
        _take_within_limits(self)


class DataMode(StrEnum):
    """The way in which the bytes of variables get into the bundle.

    `AUTO` clones or links shards. It compacts them instead where that is impossible, the server could not
    read them, less than an eighth of their bytes is kept, or the trainer wrote into files that were linked
    before. `LINK` clones or links, or fails. `COPY` copies whole shards. `COMPACT` copies only the kept byte
    ranges.
    """

    AUTO = "auto"
    LINK = "link"
    COPY = "copy"
    COMPACT = "compact"


class Verify(StrEnum):
    """The checks before anything is published; each level includes the previous ones."""

    NONE = "none"
    FILES = "files"
    BYTES = "bytes"
    OUTPUTS = "outputs"

    def includes(self, level: "Verify") -> bool:
        """Return True if this level makes all checks of `level`."""
        order = list(Verify)
        return order.index(self) >= order.index(level)


class ExportFormat(StrEnum):
    """The files of a version: a SavedModel, Cloud ML's pair (`export.meta`, a bundle `export.*`), or both."""

    SAVED_MODEL = "saved_model"
    METAGRAPH = "metagraph"
    BOTH = "both"


class Isolation(StrEnum):
    """Consistency of a response while a delta is applied: of one position, or with whole rows of two."""

    SNAPSHOT = "snapshot"
    ROW = "row"


class DeltaDtype(StrEnum):
    """The type that rows of floating-point tables are rounded to in deltas; see `exporter.delta.packing`."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class OnWild(StrEnum):
    """The treatment of rows beyond `--max-norm`: refuse the delta, keep the served rows, or send and warn."""

    REFUSE = "refuse"
    HOLD_ROW = "hold-row"
    WARN = "warn"


class EngineName(StrEnum):
    """The engine that runs the tasks of a job: threads here, or one of the user's; see `exporter.jobs`."""

    LOCAL = "local"
    RAY = "ray"
    BEAM = "beam"
    DASK = "dask"


PLACES = "Where from, where to"
SERVED = "What to serve"
NAMES = "Which tensor is which"
STORAGE = "Storage"
KEYED = "Tables by keys"
CHECKS = "Checks"
DELTAS = "Deltas"
FOLLOWING = "Following training"
WORK = "Work on many bytes"
SIGNED = "Signing"
HEADINGS = {
    PLACES: "places",
    SERVED: "model",
    NAMES: "names",
    STORAGE: "storage",
    KEYED: "tables",
    CHECKS: "checks",
    DELTAS: "deltas",
    FOLLOWING: "watch",
    WORK: "jobs",
    SIGNED: "keys",
}
"""In the order of `--help-all`; each with its topic, by which `export-model help` knows it."""

DEFAULT_TASK_BYTES = 64 << 20
"""What a task reads: a second's work for a slow disk, and a million of them for 64 TB."""

_SERVER = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})([.-]?[0-9a-z]+){0,3}")
_SIZE = re.compile(r"([1-9][0-9]{0,9})(B|KB|MB|GB|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _size(option: str, text: str, example: str) -> int:
    size = _SIZE.fullmatch(text)
    if size is None:
        raise UsageError(f"{option} {text!r} is not a size", hint=f"as in {example}")
    return int(size[1]) * _UNITS[size[2].lower()]


class DeltaBudget(Struct, frozen=True):
    """The most bytes of a delta or, if it is a rate, of all deltas in a second."""

    size: int
    is_rate: bool = False

    @classmethod
    def parse(cls, option: str, text: str) -> "DeltaBudget":
        """Parse a budget such as `64MiB` or `1MB/s`; UsageError, which names `option`, for another text."""
        size = text.removesuffix("/s")
        return cls(_size(option, size, "--delta-budget 64MiB, or 1MB/s"), size != text)


def _budget(option: str, text: str) -> str:
    DeltaBudget.parse(option, text)
    return text


class NormRule(Struct, frozen=True):
    """The largest norm of rows of the tables whose whole name matches; None: learned from the base."""

    pattern: re.Pattern[str]
    bound: float | None

    @classmethod
    def parse(cls, option: str, text: str) -> "NormRule":
        """Parse a rule such as `auto`, `100` or `PATTERN=100`, where PATTERN is a regular expression.

        UsageError, which names `option`, for another text.
        """
        pattern, _, number = text.rpartition("=")  # the last one: a regular expression may have `=`, too
        try:
            bound = None if number == "auto" else float(number)
            if bound is not None and not 0 < bound < math.inf:
                raise ValueError("a bound is positive and finite")
            return cls(re.compile(pattern or ".*"), bound)
        except (ValueError, re.error) as error:
            hint = "as in --max-norm auto, --max-norm 100 or --max-norm 'embedding.*=100'"
            raise UsageError(f"{option} {text!r} names no bound", cause=str(error), hint=hint) from error

    def is_for(self, variable: str) -> bool:
        """Return True if the pattern matches the whole name of a variable, without `[...]` of a part."""
        return self.pattern.fullmatch(variable.partition("[")[0]) is not None

    @property
    def is_of_whole(self) -> bool:
        """True if the rule also bounds variables that are not tables: it is learned, or has a pattern."""
        return self.bound is None or self.pattern.pattern != ".*"


def _path_or_url(option: str, text: str) -> str:
    return local_name(option, text) if Url.parse(text) is None else text


# One for each heading, in the order of `HEADINGS`.
_places, _served, _names, _storage, _keyed, _checks, _deltas, _following, _work, _signed = (
    partial(Option, heading=heading) for heading in HEADINGS
)
_OF_BASES: Mapping[str, Any] = {"heading": DELTAS, "goes_with": "--incr or --new-base"}
"""Settings of the options of `Updates`. Those of the first release have the digest `always`; a new one says
`if given`, or the digest of every base that is published would change.
"""


_ENGINE_WORDS = {
    "local": "threads here",
    "ray": "Ray",
    "beam": "Apache Beam",
    "dask": "Dask",
    "address=ADDRESS": "the engine's cluster; ray://HOST:10001 or tcp://HOST:8786 chooses the engine, too",
    "task-size=SIZE": "bytes that one task reads, by default 64MiB",
    "NAME=VALUE": "an option of the engine's own",
}
_ENGINE_OF = {"ray": EngineName.RAY, "tcp": EngineName.DASK, "tls": EngineName.DASK}
"""The engine of an address, by its scheme."""


def _engine(option: str, texts: Sequence[str]) -> Fields:
    """Return the fields of `Jobs` that the values of `--engine` set, by field.

    UsageError for an unknown engine, for two values of one field, or if no value names the engine.
    """
    found, settings = Fields(), dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        scheme, is_address, _ = text.partition("://")
        if is_address and scheme in _ENGINE_OF:
            told: dict[str, Any] = {"engine": _ENGINE_OF[scheme], "address": text}
        elif not equals and text in list(EngineName):
            told = {"engine": EngineName(text)}
        elif not equals or not value:
            close = given.nearest_name(text, list(EngineName))
            hint = f"{option} {close}" if close else f"one of {', '.join(_ENGINE_WORDS)}"
            raise UsageError(f"{option} {text!r} is not an engine, an address or NAME=VALUE", hint=hint)
        elif name == "address":
            told = {"address": value}
        elif name == "task-size":
            told = {"task_bytes": _size(f"{option} task-size", value, f"{option} task-size=256MiB")}
        else:
            settings[name], told = value, {}
        for field_, value_ in told.items():
            if found.setdefault(field_, value_) != value_:
                raise UsageError(f"{option} names two of {field_}: {found[field_]} and {value_}")
    if settings:
        found["settings"] = settings
    if "engine" not in found and {*found} - {"task_bytes"}:
        raise UsageError(
            f"{option} {texts[0]} goes with the name of an engine",
            hint=f"as in {option} dask {option} {texts[0]}",
        )
    return found


def _engine_texts(found: Fields) -> Iterator[str]:
    """Yield the values of `--engine` that set the fields in `found`."""
    names = {"engine": "{}", "address": "address={}", "task_bytes": "task-size={}B"}
    yield from (names[name].format(value) for name, value in found.items() if name in names)
    yield from (f"{name}={value}" for name, value in found.get("settings", {}).items())


class Jobs(_Limited, frozen=True, repr_omit_defaults=True):
    """The execution of work on many bytes.

    With an `engine`, jobs are kept beside their results, or in `directory` (a path that all workers see, or a
    URL): the same command, on any engine, resumes an unfinished job. `address` and `settings` belong to the
    engine; `task_bytes` is the number of bytes that one task reads.
    """

    engine: Annotated[
        EngineName | None,
        _work(
            "Move, cast, compare and check as tasks of an engine, which resumes a job that ended half-way; "
            "repeatable:",
            metavar="ENGINE|NAME=VALUE",
            words=_ENGINE_WORDS,
            typed=tuple[str, ...],
            parse=_engine,
            fields=("engine", "address", "settings", "task_bytes"),
            text=_engine_texts,
        ),
    ] = None
    workers: Annotated[
        int,
        _work("Tasks that run at once; 0: as many as there are processors.", metavar="N", least=0),
    ] = 0
    address: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    task_bytes: int = DEFAULT_TASK_BYTES
    directory: Annotated[
        str,
        _work(
            "Keep results of tasks here, where all workers see them; those of an export are below the model.",
            name="--job-dir",
            metavar="DIR|URL",
            parse=_path_or_url,
            goes_with="--engine",
        ),
    ] = ""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[JobsKeywords]) -> None: ...


LOCALLY = Jobs()
"""Work runs in threads of this process, and jobs are not kept."""


class Signing(_Limited, frozen=True, repr_omit_defaults=True):
    """The key and the name by which publications are signed; see `exporter.publish.signing`.

    `sign_key` is a file that only its owner may read, or `env:NAME`: a variable with the file's content.
    """

    sign_key: Annotated[
        str | None,
        _signed("Sign what is published with this Ed25519 key (PEM).", metavar="FILE|env:NAME"),
    ] = None
    signed_as: Annotated[
        str | None,
        _signed(
            "The model's name in signatures; with @ID the model of that identity alone.",
            metavar="NAME[@ID]",
            default="the last part of its path or URL",
            goes_with="--sign-key",
        ),
    ] = None
    trust: Annotated[
        tuple[Path, ...],
        _signed(
            "In a store, build on what this public key (PEM) has signed, too. Repeatable.",
            metavar="FILE",
            goes_with="--sign-key",
        ),
    ] = ()
    unsigned: Annotated[
        bool, _signed("Publish without a key, though what is published so far is signed.")
    ] = False


UNSIGNED = Signing()
"""Nothing is signed, and nothing was."""


class Trusting(_Limited, frozen=True, repr_omit_defaults=True):
    """Whose publications are taken: of keys in these files, of which one may hold several."""

    trust: Annotated[
        tuple[Path, ...],
        _signed(
            "Take nothing but what this public key (PEM, of Ed25519) has signed. Repeatable.", metavar="FILE"
        ),
    ] = ()
    signed_as: Annotated[
        str | None,
        _signed(
            "The model's name in signatures; with @ID the model of that identity alone.",
            metavar="NAME[@ID]",
            default="the last part of its path or URL",
            goes_with="--trust",
        ),
    ] = None


ANYBODY = Trusting()
"""All publications are accepted, whoever made them."""


class Updates(_Limited, frozen=True, repr_omit_defaults=True):
    """The options of a base that takes deltas; see `exporter.subgraph.make_updatable`."""

    isolation: Annotated[
        Isolation,
        in_parts(
            {
                "snapshot": Part(
                    "isolation", "no response mixes two positions", value=Isolation.SNAPSHOT, digest="always"
                ),
                "snapshot=N": Part(
                    "snapshot_max_rows",
                    "deltas of more than N rows, by default 4000000, are applied in visible pieces",
                    count,
                    least=0,
                    digest="always",
                ),
                "row": Part("isolation", "responses may mix positions", value=Isolation.ROW, digest="always"),
            },
            "Consistency during an update",
            metavar="WORD",
            **_OF_BASES,
        ),
    ] = Isolation.SNAPSHOT
    snapshot_max_rows: int = 4_000_000
    stamp: Annotated[
        bool,
        in_parts(
            {
                "stamp": Part("stamp", "model_position and model_step in predict responses", digest="always"),
                "digest": Part(
                    "digest", "a signature that returns checksums of the served values", digest="always"
                ),
                "nan-check": Part(
                    "finite",
                    "refuse deltas with NaN or infinity; with --verify bytes new bases, too",
                    digest="always",
                ),
            },
            "Give a base this, too",
            name="--add",
            metavar="WORD",
            **_OF_BASES,
        ),
    ] = False
    digest: bool = False
    finite: bool = False

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[UpdatesKeywords]) -> None: ...


Model: TypeAlias = Annotated[
    str | Callable[..., Any] | None,
    _served(
        "What to serve: pkg.mod:fn, path/file.py:fn, a .meta file or a SavedModel directory.",
        metavar="WHAT",
        typed=str | None,
    ),
]
"""A name, a builder itself, or a Keras model; None: what lies beside the checkpoint."""


_ALLOWED = {
    "code": "trust the model: run its archive's code, and any operation of its graph on this machine",
    "files=DIR": "a graph found beside the checkpoint may read this directory, too",
    "file-ops": "operations that use files, call other processes, or are unknown",
    "foreign-ops": "operations that stock TensorFlow lacks, with all that they need",
    "dropout": "dropout and noise that are on, so that equal requests get different answers",
    "batch-statistics": "normalise each request by its own batch, although moving statistics exist",
}


class GraphOptions(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The options about a model's graph."""

    model_args: Annotated[
        Mapping[str, str],
        _served("Builder's argument. Repeatable.", name="--model-arg", metavar="NAME=VALUE"),
    ] = field(default_factory=dict)
    inputs: Annotated[
        Mapping[str, str],
        _served("Input, by tensor name. Repeatable.", name="--input", metavar="NAME=TENSOR"),
    ] = field(default_factory=dict)
    outputs: Annotated[
        Mapping[str, str],
        _served("Output, by tensor name. Repeatable.", name="--output", metavar="NAME=TENSOR"),
    ] = field(default_factory=dict)
    signatures: Annotated[
        Path | None, _served("JSON file that defines several signatures.", metavar="FILE")
    ] = None
    tag: Annotated[str | None, _served("Serve a SavedModel's graph with these tags.", metavar="TAG,TAG")] = (
        None
    )
    feeds: Annotated[
        Mapping[str, str],
        _served(
            "Give a placeholder a constant value: keep_prob=1.0. Repeatable.",
            name="--feed",
            metavar="PLACEHOLDER=VALUE",
        ),
    ] = field(default_factory=dict)
    absent_keys: Annotated[
        Mapping[str, str],
        _served(
            "What a table by keys gives for a key that it lacks. Repeatable.",
            name="--absent-key",
            metavar="TABLE=NUMBER",
        ),
    ] = field(default_factory=dict)
    """Numbers by regular expressions for tables' names."""
    allow: Annotated[
        tuple[str, ...],
        _served("Serve what is refused otherwise; repeatable:", metavar="WORD", words=_ALLOWED),
    ] = ()
    custom_objects: Annotated[
        tuple[str, ...],
        _served("Module with classes that a Keras archive may use. Repeatable.", metavar="PKG.MOD|FILE.PY"),
    ] = ()
    train_tag: Annotated[
        str | None, _served("Also keep the SavedModel's training graph of this tag.", metavar="TAG")
    ] = None

    def allows(self, what: str) -> bool:
        """True if the word `what` is one of the values of `--allow`."""
        return what in self.allow

    @property
    def allowed_directories(self) -> tuple[Path, ...]:
        """The directories that a graph found beside the checkpoint may also read: `--allow files=DIR`.

        UsageError if one is a URL.
        """
        texts = (text.partition("=") for text in self.allow)
        return tuple(local_path("--allow files", path) for word, _, path in texts if word == "files")


_REQUESTS = {
    "FILE": Part("warmup", "warm-up requests of the version; --verify outputs tries them, too", local_path),
    "verify=FILE": Part("verify_inputs", "requests for --verify outputs alone", local_path),
    "none": Part("no_warmup", "no warm-up requests, nor generated ones", digest="always"),
}
_KEEP = {
    "N": Part("keep", "the newest N", count, least=1),
    "hourly=N": Part(
        "keep_hourly",
        "also the newest of each of the last N hours that have one",
        count,
        least=0,
        needs=("keep",),
    ),
    "daily=N": Part(
        "keep_daily",
        "also the newest of each of the last N days that have one",
        count,
        least=0,
        needs=("keep",),
    ),
}
_KEYS = {
    "min-freq=N": Part("min_freq", "seen N times or more", count, least=0),
    "max-age-steps=N": Part("max_age_steps", "updated in the last N steps", count, least=0),
}
_CHECKED = {
    "none": Part("verify", "nothing", value=Verify.NONE, digest="always"),
    "files": Part("verify", "index, sizes, small files; the default", value=Verify.FILES, digest="always"),
    "bytes": Part("verify", "every value, too", value=Verify.BYTES, digest="always"),
    "outputs": Part("verify", "responses, too", value=Verify.OUTPUTS, digest="always"),
    "graph": Part("check_graph", "with --incr: the graph, built again, is the base's"),
}
_BUDGET = {
    "SIZE": Part("delta_budget", "the rows that changed most, up to 64MiB a delta, or 1MB/s", _budget),
    "change=X": Part(
        "min_change", "rows that moved X or more (Euclidean norm) since they were sent", number, least=0.0
    ),
    "age=TIME": Part(
        "max_row_age",
        "each row after this time (90, 10m, 2h), whatever the budget",
        given.parse_duration,
        least=0.0,
        needs=("delta_budget", "min_change"),
    ),
}


def _renames(option: str, texts: Sequence[str]) -> Fields:
    """Return the fields that the values of `--rename` set, by field; UsageError for two files, or a URL."""
    found = Fields()
    if rules := tuple(text for text in texts if "=" in text):
        found["renames"] = rules
    if files := [text for text in texts if "=" not in text]:
        if len(files) > 1:
            raise UsageError(f"{option} names two files, {files[0]} and {files[1]}", hint="name one")
        found["rename_file"] = local_path(option, files[0])
    return found


def _rename_texts(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of `--rename` that set the fields in `found`."""
    yield from found.get("renames", ())
    if "rename_file" in found:
        yield str(found["rename_file"])


class ExportOptions(GraphOptions, frozen=True, kw_only=True):
    """All options of an export."""

    format: Annotated[
        ExportFormat, _places("Write a SavedModel, Cloud ML's pair, or both.", digest="always")
    ] = ExportFormat.SAVED_MODEL
    version: Annotated[
        str | int | None,
        _places(
            "The version's number, or time: seconds since 1970.",
            metavar="N|time",
            default="the training step while it grows",
            typed=str | None,
        ),
    ] = None
    for_server: Annotated[
        str | None,
        _places(
            "Publish what servers of this TensorFlow load: 1.15 or newer.",
            metavar="VERSION",
            default="the newest",
            digest="if given",
        ),
    ] = None
    plain: bool = False
    """Publish a version that takes no deltas, although the newest one does."""
    despite_hold: bool = False
    """Publish a version although the model is held."""
    again: bool = False
    """Publish once more what is published already by the same plan."""
    renames: Annotated[
        tuple[str, ...],
        _names(
            "Map variables (regular expression) to tensor names, or by a file of lines 'variable tensor', "
            "where # begins a comment. Repeatable.",
            name="--rename",
            metavar="PATTERN=NAME|FILE",
            parse=_renames,
            fields=("renames", "rename_file"),
            text=_rename_texts,
        ),
    ] = ()
    rename_file: Path | None = None
    by_order: Annotated[bool, _names("Match arrays without names to variables by the graph's order.")] = False
    average: Annotated[
        str | None, _names("Serve moving averages instead of raw weights.", metavar="ema|NAME")
    ] = None
    partition_strategies: Annotated[
        Mapping[str, str],
        _names(
            "How training spread a table's rows over its parts. Repeatable.",
            name="--partition-strategy",
            metavar="NAME=mod|div",
        ),
    ] = field(default_factory=dict)
    ignored: Annotated[
        tuple[str, ...],
        _names(
            "Serve layers without these variables (regular expression), which the checkpoint has and the "
            "graph has not. Repeatable.",
            name="--ignore",
            metavar="NAME",
        ),
    ] = ()
    object_path: Annotated[
        str | None, _names("Path to the served model in a TF2 checkpoint: net/tower.", metavar="PATH")
    ] = None
    casts: Annotated[
        tuple[str, ...],
        _storage(
            "Store matching variables in 16 bits, or tables in 8 (by keys: TABLE/values). Repeatable.",
            name="--cast",
            metavar="[PATTERN=]bfloat16|float16|int8",
        ),
    ] = ()
    data: Annotated[
        DataMode,
        _storage("How values reach the version; compact copies only the needed bytes.", digest="always"),
    ] = DataMode.AUTO
    map_tables: Annotated[
        bool,
        _storage("Let servers map large tables instead of reading them when they load.", digest="if given"),
    ] = False
    served_at: Annotated[
        str | None,
        _storage(
            "The model's directory as servers see it, for mapped tables.",
            metavar="DIR",
            default="--out",
            goes_with="--map-tables",
            digest="if given",
        ),
    ] = None
    overlay_rows: Annotated[
        int | None,
        _storage(
            "Room for N changed rows beside each mapped table of a base that takes deltas.",
            metavar="N",
            least=1,
            default="a quarter of its rows",
            goes_with="--map-tables",
            digest="if given",
        ),
    ] = None
    """Memory is taken by the rows that change, up to this bound."""
    hot_rows: Annotated[
        Mapping[str, str],
        _storage(
            "Lay the most read rows of a mapped table side by side: those in a .npy file, or by the "
            "checkpoint's counts. Repeatable.",
            metavar="TABLE=FILE|auto",
            goes_with="--map-tables",
            digest="if given",
        ),
    ] = field(default_factory=dict)
    """A file has row numbers, or a table's keys, the most read first."""
    warmup: Path | None = None
    """Without them a base that takes deltas, and a version that maps its tables, brings generated ones."""
    no_warmup: Annotated[
        bool,
        in_parts(
            _REQUESTS,
            "Requests of the model, one in REST's JSON on each line",
            heading=STORAGE,
            name="--requests",
            metavar="FILE|none",
        ),
    ] = False
    keep: Annotated[
        int | None,
        in_parts(_KEEP, "Keep these versions, and remove others", heading=STORAGE, metavar="N"),
    ] = None
    keep_hourly: int = 0
    keep_daily: int = 0
    table_head_room: Annotated[
        float | None, _keyed("Room for X times more keys in tables.", metavar="X", default="0.25")
    ] = None
    min_freq: Annotated[
        int,
        in_parts(_KEYS, "Serve only these keys of tables", heading=KEYED, name="--keys", metavar="WORD=N"),
    ] = 0
    max_age_steps: int | None = None
    verify: Annotated[
        Verify,
        in_parts(_CHECKED, "What to check before publishing", heading=CHECKS, metavar="WORD"),
    ] = Verify.FILES
    verify_inputs: Path | None = None
    tolerance: Annotated[
        float,
        _checks(
            "Largest absolute difference that --verify outputs accepts.",
            metavar="X",
            goes_with="--verify outputs",
        ),
    ] = 1e-6
    golden: Annotated[
        Path | None, _checks("Golden requests that a version or base must pass.", metavar="FILE")
    ] = None
    updates: Updates | None = None
    """How the version takes deltas; None: it takes none."""
    delta_dtype: Annotated[
        DeltaDtype | None,
        _deltas(
            "With --incr: send table rows as bfloat16 or int8; reports the largest error.",
            goes_with="--incr",
        ),
    ] = None
    delta_budget: Annotated[
        str | None,
        in_parts(
            _BUDGET,
            "With --incr: send these rows, hold others back",
            heading=DELTAS,
            metavar="SIZE",
            goes_with="--incr",
        ),
    ] = None
    min_change: float = 0.0
    max_row_age: float | None = None
    max_norm: Annotated[
        tuple[str, ...],
        _deltas(
            "With --incr: look for table rows whose Euclidean norm is larger. Repeatable.",
            metavar="auto|X|PATTERN=X",
            goes_with="--incr",
        ),
    ] = ()
    """`auto` learns a bound for each table from the base."""
    on_wild: Annotated[
        OnWild,
        _deltas("What to do with rows beyond --max-norm.", goes_with="--max-norm"),
    ] = OnWild.WARN
    check_graph: bool = False
    jobs: Jobs = LOCALLY
    """Where values are cast, moved and compared."""
    signing: Signing = UNSIGNED
    """Who signs what is published."""


class ExportRequest(ExportOptions, frozen=True, metaclass=Checked):
    """A whole export: from where, to where, and all options, which are given by name."""

    ckpt_dir: Path
    """A checkpoint, or a directory of which the newest one is exported; a path, or the URL of a store."""
    out: Path
    """The model base path; a path or, for functions of `exporter`, the URL of a store."""
    model: Model = None

    if TYPE_CHECKING:

        def __init__(
            self,
            ckpt_dir: StrPath,
            out: StrPath,
            model: StrPath | Callable[..., Any] | None = None,
            **options: Unpack[ExportKeywords],
        ) -> None: ...

    def _take(self) -> None:
        """Convert the values of all fields, in place: strings become paths and enums, `file://` a local path.

        Raises:
            UsageError: a value does not fit its field, is a URL that nothing would read, or has no effect
                without another option.
        """
        force_setattr(self, "ckpt_dir", given.place("ckpt_dir", self.ckpt_dir, _checkpoint("--ckpt-dir")))
        force_setattr(self, "out", given.place("out", self.out, _checkpoint("--out")))
        force_setattr(self, "model", _model(self.model))
        force_setattr(self, "for_server", _server(self.for_server))
        if isinstance(self.version, bool) or not isinstance(self.version, str | int | None):
            raise given.wrong("version", self.version, 'a number, "time" or None')
        # `own`: converted once more, by one type each, a URL, a function or a number would be refused.
        _take_within_limits(self, own=("ckpt_dir", "out", "model", "version"))
        require_company([self])
        if self.verify_inputs is not None and self.verify is not Verify.OUTPUTS:
            raise UsageError(
                "--requests verify=FILE goes with --verify outputs",
                hint="add --verify outputs, or leave out --requests verify=FILE",
            )
        if self.delta_budget is not None:
            DeltaBudget.parse("--delta-budget", self.delta_budget)
        for text in self.max_norm:
            NormRule.parse("--max-norm", text)
        for name in ("min_change", "max_row_age"):
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise given.wrong(name, value, "a finite number")
        modules = tuple(local_name("--custom-objects", name) for name in self.custom_objects)
        force_setattr(self, "custom_objects", modules)


def _checkpoint(option: str) -> Callable[[str, StrPath], Path]:
    return lambda _, place: checkpoint_path(option, place)


_NEWEST_MAJOR = 2


def _server(given_as: Any) -> str | None:
    """Return the major and minor number of a version of TensorFlow, as in `2.4`; None for None.

    UsageError if it is not a version, older than 1.15, or of a later major than 2.
    """
    if given_as is None:
        return None
    from exporter.wire.stock_ops import OLDEST  # few ask for it

    found = _SERVER.fullmatch(given_as) if isinstance(given_as, str) else None
    if found is None:
        raise UsageError(
            f"--for-server {given_as!r} is not the version of a TensorFlow", hint="as in --for-server 2.4"
        )
    if int(found[1]) > _NEWEST_MAJOR:
        raise UsageError(
            f"--for-server {given_as}: there is no TensorFlow {found[1]}",
            hint="give the version of the servers, as in --for-server 2.19, or leave it out",
        )
    if (int(found[1]), int(found[2])) < OLDEST:
        raise UsageError(
            f"--for-server {given_as} is too old: models are made for TensorFlow 1.15 and newer",
            hint="leave it out, or give --for-server 1.15",
        )
    return f"{int(found[1])}.{int(found[2])}"


def _model(what: Any) -> Any:
    if isinstance(what, Path | str) and str(what):
        return local_name("--model", str(what))
    if what is None or callable(what):
        return what
    expected = '"pkg.mod:fn", "file.py:fn", a path, a function or a Keras model'
    raise given.wrong("model", what, expected, 'model="my_model.py:serving", or model=serving')


_IN_PYTHON = {  # what the command line has in another form
    "again": "Publish the checkpoint even if it is published already.",
    "plain": "Publish a version that takes no deltas, although the newest one does.",
    "despite_hold": "Publish a version although the model is held.",
    "renames": "Map variables (regular expression) to tensor names.",
    "rename_file": "File with lines 'variable tensor'; # begins a comment.",
    "updates": "How the version takes deltas; None: it takes none.",
    "jobs": "Where values are cast, moved and compared.",
    "signing": "Who signs what is published.",
    "engine": "Move, cast, compare and check as tasks of this engine; resumes a job that ended half-way.",
    "address": "The cluster of the engine: ray://HOST:10001, tcp://HOST:8786.",
    "settings": "The engine's own options.",
    "task_bytes": "How many bytes one task reads.",
}
_OPTION_IN_TEXT = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?: (bytes|outputs))?")


def meanings(kind: type[Struct]) -> dict[str, str]:
    """Return the help text of each option of a struct, by field, with options as in Python."""
    told: dict[str, str] = {}
    for one in declared(kind):
        if len(one.path) == 1:
            texts = one.option.of_fields() or {one.path[0]: one.option.told}
            told |= {name: _in_python(text) for name, text in texts.items()}
    told |= _IN_PYTHON  # last: it replaces texts of the command line
    return {name: told[name] for name in kind.__struct_fields__ if name in told}


def _in_python(text: str) -> str:
    text = (
        text.replace(" Repeatable.", "")
        .replace("; repeatable:", ":")
        .replace("With --incr: ", "For deltas: ")
    )
    return _OPTION_IN_TEXT.sub(lambda found: _argument(*found.groups()), text)


def _argument(name: str, value: str | None) -> str:
    name = name.replace("-", "_")
    return f'{name}="{value}"' if value else name


for _kind in (Updates, Jobs, Signing, Trusting, ExportRequest):
    _told = (f"        {name}: {text}" for name, text in meanings(_kind).items())
    _kind.__doc__ = "\n".join([_kind.__doc__ or "", "", "    By name:", *_told, "    "])


def require_local(request: ExportRequest) -> None:
    """Refuse a request whose model, `out`, is a URL: the caller works on local paths alone.

    Raises:
        UsageError: `out` is a URL.
    """
    local_path("--out", request.out)


_OF_DELTAS = {
    "min_change",
    "delta_dtype",
    "delta_budget",
    "max_row_age",
    "max_norm",
    "on_wild",
    "check_graph",
}
_FOR_DELTAS = "export(request, save_incr_model=True), or export_incremental(request)"


def require_exact(request: ExportRequest, hint: str = _FOR_DELTAS) -> None:
    """Refuse options of deltas in a request for a version; `hint` is the error's.

    Raises:
        UsageError: `min_change`, `check_graph` or the like is set: a version is exact.
    """
    plain = {each.name: default_of(each) for each in fields(ExportRequest)}
    given = sorted(name for name in _OF_DELTAS if getattr(request, name) != plain[name])
    if given:
        raise UsageError(f"{', '.join(given)}: such options are for deltas, a version is exact", hint=hint)
