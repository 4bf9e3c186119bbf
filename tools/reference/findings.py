"""The page of findings: what each code means, and what to do about it.

A code of `exporter.publish.judge` without an entry here fails the making of the page.
"""

from __future__ import annotations

from exporter.pipeline.doctor import CHECKS
from exporter.publish.judge import Code, Level
from serving.agent.meanings import MEANINGS
from tools.reference.markdown import code, table

_PAGE = """\
# Findings

What `export-model doctor` lists, and what the agent's page and `/status.json` say, has a `code`: a word that
does not change, while the sentences may. This page explains each, the worst first.
[JSON documents](documents.md) has the other fields.

What is `wrong` (on the agent's page `bad`) is not served as it should be: somebody has to act. A `warning`
works, and costs or will end. `busy` and `good` need nobody. That a server lacks something is a warning for a
moment, and wrong later.

{index}
"""
_LEVELS = {Level.WRONG: "wrong", Level.WARNING: "a warning", Level.BUSY: "busy", Level.GOOD: "good"}


def page() -> str:
    """The page."""
    levels = {level: [each for each in Code if each.level is level] for level in Level}
    index = table(
        ("level", "code: what a table says"),
        (
            (name, ", ".join(f"[{each.value}](#{each.value}): {each.word}" for each in levels[level]))
            for level, name in _LEVELS.items()
        ),
    )
    return "\n".join([_PAGE.format(index=index), *(_section(each) for each in Code)])


def _section(each: Code) -> str:
    meaning, check = MEANINGS[each], CHECKS.get(each)
    where = f"; the doctor's check {code(check.value)}" if check is not None else ""
    return (
        f"## {each.value}\n\n“{each.word}”: {_LEVELS[each.level]}{where}.\n\n{meaning.says}\n\n"
        f"*What to do.* {meaning.do}\n"
    )
