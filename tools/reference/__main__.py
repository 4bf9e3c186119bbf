"""`python -m tools.reference`: write every page that is made from the code."""

from __future__ import annotations

from tools.reference.pages import ROOT, made

for path, content in made().items():
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_text(content)
