"""Explain a command line that Click refused, and propose the one that was probably meant."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from exporter.errors import UsageError, nearest
from exporter.storage.local_paths import quoted
from exporter.terminal.help import brief, program_of
from exporter.terminal.parameters import variable_of

# Ranges first: the texts without one are their beginnings.
_PLAINLY = {
    "is not a valid int range": "is not a whole number",
    "is not a valid int": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
_SUGGESTIONS = re.compile(r" (?:\(Possible options: .*\)|Did you mean .*)$")
_EXTRA = re.compile(r"extra argument.*\((.*)\)")
_UNKNOWN_COMMAND = re.compile(r"No such command (.*?)\.(?: Did you mean .*)?", re.DOTALL)


def wrong_use(
    error: Any, command: Any, program: str, arguments: Sequence[str], takes: Sequence[str]
) -> UsageError:
    """Return the UsageError for a command line that Click refused with `error`; its hint corrects the line.

    `command` is the program's root, `program` its name, `arguments` were typed after it. `takes` are the
    options, or the command, for words typed in place of a command, in their order: such a word is probably a
    path.
    """
    message = error.format_message()
    for technical, plain in _PLAINLY.items():
        message = message.replace(technical, plain)
    context = error.ctx or _context(command, program, arguments)
    hint = f"see {context.command_path} --help"
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
        message = f"a command is missing: {', '.join(command.list_commands(context))}"
    elif (option := _option_without_value(context, arguments)) is not None:
        name, value, follows = option
        message = f"{name} has no value: {follows} follows"
        hint = _command_line(program, _with_correction(arguments, name, f"{name} {value}"))
    elif (unknown := _UNKNOWN_COMMAND.fullmatch(message)) is not None:
        word = literal_eval(unknown[1])
        message = f"there is no command {word!r}"
        hint = _unknown_word(word, context, program, arguments, takes)
    elif (wrong := getattr(error, "option_name", None)) and "No such option" in message:
        message = _SUGGESTIONS.sub("", message)
        hint = _with_nearest_option(wrong, context, program, arguments) or hint
    elif (parameter := getattr(error, "param", None)) is not None:
        message, hint = _wrong_value(error, parameter, message, context, program, arguments)
    elif wrong is not None:
        found = next((one for one in context.command.params if wrong in one.opts), None)
        hint = hint if found is None else _told(found, context)
    elif (extra := _EXTRA.search(message)) is not None:
        hint = _with_names(extra[1].split(" "), context, program, arguments, takes)
    return UsageError(message, hint=hint)


def _with_nearest_option(wrong: str, context: Any, program: str, arguments: Sequence[str]) -> str:
    """Return the command line with the option nearest to the unknown option `wrong`; "" if none is near."""
    options = (one for one in context.command.params if one.param_type_name == "option")
    names = {(name := max(one.opts, key=len)).lstrip("-"): name for one in options}
    close = nearest(wrong.lstrip("-"), names)  # dashes are alike in all of them
    return _command_line(program, _with_correction(arguments, wrong, names[close])) if close else ""


def _wrong_value(
    error: Any, parameter: Any, message: str, context: Any, program: str, arguments: Sequence[str]
) -> tuple[str, str]:
    """Return message and hint for a missing or wrong value of Click's `parameter`; they say where it was set.

    That is a file of options, as `error` records, or a variable of the environment.
    """
    if message.startswith("Missing"):
        hint = _with_missing(program, [*_with_position(parameter, arguments)], parameter, context)
    else:
        hint = _nearest_choice(parameter, message) or _told(parameter, context)
    if (file := getattr(error, "file_of_options", None)) is not None:
        return f"{file}: {message}", f"correct it in {file}; {hint}"
    if (variable := variable_of(context, parameter)) is not None:
        return f"{variable}: {message}", f"correct {variable}, or unset it; {hint}"
    return message, hint


def _with_names(
    extra: Sequence[str], context: Any, program: str, arguments: Sequence[str], takes: Sequence[str]
) -> str:
    """Return the command line in which surplus words, `extra`, are the values of options in `takes`.

    Options that the command does not have, or that are typed already, are passed over; surplus words without
    an option are left out.
    """
    known = {name for one in context.command.params for name in getattr(one, "opts", ())}
    free = [name for name in takes if name in known and name not in arguments]
    named = [part for pair in zip(free, extra, strict=False) for part in pair]
    left = [each for each in arguments if each not in extra]
    at = 1 if left[:1] == [context.command.name] else 0
    return _command_line(program, [*left[:at], *named, *left[at:]])


def _context(command: Any, program: str, arguments: Sequence[str]) -> Any:
    """Return the Click context of the typed command, made without parsing; the root's if none was typed.

    `command` is the program's root, `program` its name; `arguments` were typed after it.
    """
    root = command.make_context(program, [], resilient_parsing=True)
    sub = next((one for each in arguments if (one := command.get_command(root, each))), None)
    return root if sub is None else sub.make_context(sub.name, [], parent=root, resilient_parsing=True)


def _with_missing(program: str, arguments: Sequence[str], parameter: Any, context: Any) -> str:
    """Return the command line with its missing parameter; surplus words become values of required options.

    For a missing position it is the option, and the command that lists the model's positions. `arguments`
    begin with the command's name, if there is one; `parameter` and `context` are Click's.
    """
    own = sum(one.param_type_name == "argument" for one in context.command.params)
    asked, words = arguments[: 1 + own], arguments[1 + own :]
    required = [one for one in context.command.params if one.param_type_name == "option" and one.required]
    are_values = 0 < len(words) <= len(required) and not any(each.startswith("-") for each in arguments)
    if are_values and parameter.param_type_name == "option":
        named = (
            part
            for one, word in zip(required, words, strict=False)
            for part in (max(one.opts, key=len), word)
        )
        return _command_line(program, [*asked, *named])
    line = _command_line(program, arguments)
    is_there = any(name in arguments for name in parameter.opts)
    if parameter.metavar == "POSITION" and not is_there:
        lists = f"{program} history {quoted(context.params['model'])}"
        return f"add {_usage_of(parameter, context)}; list the positions: {lists}"
    return line if is_there else f"{line} {_usage_of(parameter, context)}"


def _with_position(parameter: Any, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line; MODEL@POSITION is split if the missing option takes a position.

    `parameter` is the missing option, or argument, of Click. The split word becomes the model, the option's
    name and the position.
    """
    is_position = parameter.metavar == "POSITION" and parameter.param_type_name == "option"
    for each in arguments:
        model, at, position = each.rpartition("@")
        yield from (
            (model, max(parameter.opts, key=len), position) if is_position and at and model else (each,)
        )


def _option_without_value(context: Any, arguments: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the first option without its value: its name, metavar, and the option that follows it.

    None if each has its value. `context` is Click's, of the typed command; `arguments` are its words.
    """
    known = {name: one for one in context.command.params for name in getattr(one, "opts", ())}
    for name, follows in pairwise(arguments):
        one = known.get(name)
        if one is not None and not getattr(one, "is_flag", True) and follows in known:
            return name, one.make_metavar(context).partition("|")[0], follows
    return None


def _unknown_word(
    word: str, context: Any, program: str, arguments: Sequence[str], takes: Sequence[str]
) -> str:
    """Return the command line probably meant, in which an unknown word is replaced, or an option's value.

    A command of the other program leads there. Any other word is replaced by the nearest command; if none is
    near, it becomes the value of the first option in `takes` that is not typed, and words after it the values
    of the next ones.
    """
    other = program_of(word)
    if other not in (None, program):
        return _command_line(other, arguments)
    if word in _MEANT:
        command, option = _MEANT[word]
        return f"{_command_line(program, _with_correction(arguments, word, command))} {option}"
    if word not in (paired := [*_with_pairs(context, arguments)]):
        return _command_line(program, paired)
    if close := nearest(word, context.command.list_commands(context)):
        return _command_line(program, _with_correction(arguments, word, close))
    at = arguments.index(word)
    missing = [option for option in takes if option not in arguments] or takes
    words = list(takewhile(lambda each: not each.startswith("-"), arguments[at:]))[: len(missing)]
    named = [part for option, each in zip(missing, words, strict=False) for part in (option, each)]
    return _command_line(program, [*named, *arguments[:at], *arguments[at + len(words) :]])


def _with_pairs(context: Any, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line; a NAME=VALUE that was typed with spaces between is joined.

    `context` is Click's, of the typed command.
    """
    options = {name: one for one in context.command.params for name in getattr(one, "opts", ())}
    words = iter(arguments)
    name, follows = "", next(words, None)
    while (each := follows) is not None:
        follows = next(words, None)
        takes_pair = name in options and re.match(r"\w+=", str(options[name].make_metavar(context)))
        while takes_pair and each.find("=") in (-1, len(each) - 1) and follows and follows[0] != "-":
            each, follows = f"{each.removesuffix('=')}={follows.removeprefix('=')}", next(words, None)
        yield each
        name = each


_MEANT = {"untag": ("tag", "--delete")}
"""Words that mean a command with an option."""


def _usage_of(parameter: Any, context: Any) -> str:
    """Return an option or argument in the form in which it is typed: `--keep N`, `MODEL`.

    Both parameters are Click's.
    """
    metavar = str(parameter.make_metavar(context))
    if parameter.param_type_name == "argument":
        return metavar.strip("{}[]")
    return f"{max(parameter.opts, key=len)} {metavar}"


def _told(parameter: Any, context: Any) -> str:
    """Return an option in the form in which it is typed, `--keep N`, and its help in one line.

    Both parameters are Click's.
    """
    return f"{_usage_of(parameter, context)}: {brief(parameter.help)}"


def _nearest_choice(parameter: Any, message: str) -> str:
    """Return an option with the choice nearest to the typed value: `--data copy`; "" if none is near.

    `message` is Click's, about a value that is not one of the choices.
    """
    typed = re.search(r"'([^']*)' is not one of", message)
    close = nearest(typed[1], getattr(parameter.type, "choices", ())) if typed else ""
    return f"{max(parameter.opts, key=len)} {close}" if close else ""


def _with_correction(arguments: Sequence[str], wrong: str, right: str) -> Iterator[str]:
    for each in arguments:
        name, equals, value = each.partition("=")
        if name != wrong:
            yield each
        else:
            yield from (f"{right}={value}",) if equals else right.split(" ")


def _command_line(program: str, arguments: Any) -> str:
    return " ".join([program, *map(quoted, arguments)])
