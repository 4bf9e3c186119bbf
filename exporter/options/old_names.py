"""The old names of options and their replacements: one table for all places where options are given.

A command line, an environment variable, a file of options and an argument in Python may have an old name. It
is accepted, with a note, by two releases after the one that renamed it; then its line in the table is
removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

NEW_NAMES = {
    "--options": "--config {}",
    "--updatable": "--new-base always",
    "--full-on-mismatch": "--new-base if-needed",
    "--rebase": "--new-base merged",
    "--stop-after": "--until {}",
    "--stop-count": "--until count={}",
    "--stop-step": "--until step={}",
    "--stop-idle": "--until idle={}",
    "--warmup": "--requests {}",
    "--no-warmup": "--requests none",
    "--verify-inputs": "--requests verify={}",
    "--engine-address": "--engine address={}",
    "--engine-option": "--engine {}",
    "--task-size": "--engine task-size={}",
    "--allow-code": "--allow code",
    "--allow-files": "--allow files={}",
    "--allow-file-ops": "--allow file-ops",
    "--allow-foreign-ops": "--allow foreign-ops",
    "--allow-dropout": "--allow dropout",
    "--allow-batch-statistics": "--allow batch-statistics",
    "--despite-hold": "--despite hold",
    "--any-role": "--despite role",
    "--plain": "--despite deltas",
    "--rename-file": "--rename {}",
    "--keep-hourly": "--keep hourly={}",
    "--keep-daily": "--keep daily={}",
    "--min-freq": "--keys min-freq={}",
    "--max-age-steps": "--keys max-age-steps={}",
    "--check-graph": "--verify graph",
    "--snapshot-max-rows": "--isolation snapshot={}",
    "--stamp": "--add stamp",
    "--with-digest": "--add digest",
    "--require-finite": "--add nan-check",
    "--min-change": "--delta-budget change={}",
    "--grpc-ca": "--grpc ca={}",
    "--grpc-cert": "--grpc cert={}",
    "--grpc-key": "--grpc key={}",
    "--grpc-name": "--grpc name={}",
    "--grpc-token-file": "--grpc token={}",
    "--rest-api-num-threads": "--flag rest_api_num_threads={}",
    "--rest-api-timeout-in-ms": "--flag rest_api_timeout_in_ms={}",
    "--model-config-file-poll-wait-seconds": "--flag model_config_file_poll_wait_seconds={}",
    "--grpc-socket-path": "--flag grpc_socket_path={}",
    "--grpc-channel-arguments": "--flag grpc_channel_arguments={}",
    "--num-request-iterations-for-warmup": "--flag num_request_iterations_for_warmup={}",
    "--saved-model-tags": "--flag saved_model_tags={}",
    "--tensorflow-session-config-file": "--flag tensorflow_session_config_file={}",
    "--tensorflow-intra-op-parallelism": "--flag tensorflow_intra_op_parallelism={}",
    "--tensorflow-inter-op-parallelism": "--flag tensorflow_inter_op_parallelism={}",
    "--tensorflow-session-parallelism": "--flag tensorflow_session_parallelism={}",
    "--rest-api-enable-cors-support": "--flag rest_api_enable_cors_support",
    "--allow-version-labels-for-unavailable-models": "--flag allow_version_labels_for_unavailable_models",
    "--enable-signature-method-name-check": "--flag enable_signature_method_name_check",
    "--enable-serialization-as-tensor-content": "--flag enable_serialization_as_tensor_content",
    "--no-model-warmup": "--flag enable_model_warmup=false",
    "--refresh-seconds": "--every refresh={}",
    "--resolve-seconds": "--every resolve={}",
    "--audit-seconds": "--every audit={}",
    "--expect-every": "--every publication={}",
    "--step-seconds": "--pace step={}",
    "--pace-factor": "--pace factor={}",
    "--pace-max-delay": "--pace max-delay={}",
    "--probe-seconds": "--pace probe={}",
    "--model": "--model-name {}",
    "--published": "--model-base-path {}",
    "--max-row-age": "--delta-budget age={}",
}
"""The option that is written now for each old one, with its value; `{}` is the value of the old option.

A name counts where a command, or a function, has the new option and does not have the old one itself.
"""
OLD_COMMAND = "export"
"""The command that `export-model` is without a command."""
OLD_ARGUMENTS = frozenset(old.lstrip("-").replace("-", "_") for old in NEW_NAMES)
"""The old names as arguments in Python."""
_FALSE = ("", "0", "false", "no", "off", "f", "n")
"""What a variable says of a flag that is not set."""


def takes_value(old: str) -> bool:
    """Return True if an old option had a value, and was not a flag."""
    return "{}" in NEW_NAMES[old]


def renewed(old: str, value: Any) -> tuple[str, list[str]]:
    """Return the new option for an old one, and the new option's values for the old option's value.

    There is one value for each element of a list or mapping, and none for None or a flag's False.
    """
    new, _, text = NEW_NAMES[old].partition(" ")
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    values = value if isinstance(value, list | tuple) else [value]
    texts = [
        text.replace("{}", str(each)) for each in values if each is not None and (each or takes_value(old))
    ]
    return new, texts


def _is_old(name: str, known: Collection[str]) -> bool:
    return name in NEW_NAMES and name not in known and NEW_NAMES[name].partition(" ")[0] in known


def renew_words(program: Any, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a Click program's arguments, `words`, under their new names, and a note on each old name.

    The former command `export` is removed, with a note, too.
    """
    notes, found, left, command = list[str](), list[str](), iter(words), program
    if words[:1] == [OLD_COMMAND] and OLD_COMMAND not in program.commands and program.invoke_without_command:
        notes.append(f"the command {OLD_COMMAND} is written without a word now")
        words = words[1:]
        left = iter(words)
    if not any(word.partition("=")[0] in NEW_NAMES for word in words):
        return [*words], notes
    for word in left:
        options = {name: one for one in command.params for name in one.opts}
        name, equals, value = word.partition("=")
        if word == "--":
            found += [word, *left]
        elif _is_old(name, options):
            new, texts = renewed(name, [value] if equals else [*_next(left)] if takes_value(name) else True)
            written = [f"{new}={text}" for text in texts] or [new]
            notes.append(f"{name} has a new name: {' '.join(written)}")
            found += written
        else:
            found.append(word)
            # Its value is taken over as it is, though it may look like an option or a command.
            if name in options and not equals and not getattr(options[name], "is_flag", True):
                found += _next(left)
            elif not word.startswith("-"):
                command = getattr(command, "commands", {}).get(word, command)
    return found, notes


def renew_arguments(arguments: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield the arguments of an export, as an earlier release wrote them, under their new names.

    `known` are options that exist under these names.
    """
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in NEW_NAMES and name not in known:
            new, texts = renewed(name, value if equals else True)
            yield from (f"{new}={text}" for text in texts)
        else:
            yield argument


def _next(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        yield word
        return


def renew_variables(program: Any, prefix: str, environment: MutableMapping[str, str]) -> list[str]:
    """Rename variables of old options in `environment`, in place, and return a note on each.

    `program` is Click's; the names of its variables begin with `prefix`. If the new variable is set already,
    the old one is only removed; for a repeatable option its values are appended.
    """
    notes = []
    for old in NEW_NAMES:
        ending = _variable(old)
        # A list, because the loop changes the environment.
        for variable in [name for name in environment if name.startswith(prefix) and name.endswith(ending)]:
            of = variable[len(prefix) : -len(ending)].strip("_").lower()
            command = program.commands.get(of) if of else program
            options = {name: one for one in getattr(command, "params", ()) for name in one.opts}
            if not _is_old(old, options):
                continue
            value = environment.pop(variable)
            is_several = options[NEW_NAMES[old].partition(" ")[0]].multiple
            # Click splits the variable of a repeatable option in the same way.
            typed: Any = value.split() if is_several else value
            new, texts = renewed(old, typed if takes_value(old) else value.lower() not in _FALSE)
            renamed = f"{variable.removesuffix(ending)}{_variable(new)}"
            before = environment.get(renamed)
            if texts and (before is None or is_several):
                environment[renamed] = " ".join([*filter(None, [before]), *texts])
            notes.append(f"{variable} has a new name: {renamed}={' '.join(texts)}")
    return notes


def _variable(option: str) -> str:
    return f"_{option.lstrip('-').replace('-', '_').upper()}"


def renew_named(named: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return options, as from a file or a Python call, under their new names, and a note on each old name.

    `known` are the existing options, as `--name`.
    """
    old = {name for name in named if _is_old(_option(name), known)}
    found, notes = {name: value for name, value in named.items() if name not in old}, []
    for name in old:
        new, texts = renewed(_option(name), named[name])
        argument = new.lstrip("-").replace("-", "_")
        before = found.get(argument, [])
        if isinstance(before, Mapping):
            before = [f"{each}={text}" for each, text in before.items()]
        values = [*(before if isinstance(before, list | tuple) else [before]), *texts]
        if texts:
            found[argument] = values[0] if len(values) == 1 else values
        notes.append(f"{name} has a new name: {argument}={' '.join(texts)}")
    return found, notes


def _option(name: str) -> str:
    return f"--{name.lstrip('-').replace('_', '-')}"
