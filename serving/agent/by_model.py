"""Options of the agent that are given once per model: `[NAME=]VALUE`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from exporter.errors import UsageError


def by_model(option: str, texts: Iterable[str], models: Collection[str]) -> dict[str, str]:
    """Return the values of a repeatable option by the model's name; a model without a value is left out.

    `option` is the option's name; `texts` are the given values, `[NAME=]VALUE`, and `models` the names of
    all models. The text before the first = is a name, unless it has a slash. With one model NAME may be left
    out.

    Raises:
        UsageError: a value names none of these models, or two name the same one.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or "/" in name:
            name, value = next(iter(models)) if len(models) == 1 else "", text
        if name not in models:
            raise UsageError(
                f"{option} {text} does not name a model",
                cause=f"the models are {', '.join(models)}",
                hint=f"name one, as --model-base-path does: {option} NAME=...",
            )
        if name in found:
            raise UsageError(f"{option} names {name} twice", hint=f"say {option} once for each model")
        found[name] = value
    return found
