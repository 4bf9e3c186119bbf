"""`python -m tools.reference`: write every page that is made from the code."""

from __future__ import annotations

from tools.reference.pages import PATHS, ROOT, made

for path in PATHS:
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_text(made(path))
