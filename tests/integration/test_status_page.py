"""The status page in a real browser: light and dark, hundreds of replicas, whatever names and errors hold."""

from __future__ import annotations

import json
import re
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from serving.agent.http import plot
from serving.agent.journal import EventKind, FleetEvent, Journal
from serving.agent.view import FleetView, ModelView
from tests.support.status_pages import (
    CHROMIUM,
    NOON,
    PICTURES,
    chromium,
    large,
    main,
    replica,
    shown,
    size_and_corner,
    take_picture,
    usual,
)

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


class Found(HTMLParser):
    """What a browser made of a page: how often each element is there, its text, and attributes that act."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.texts: list[str] = []
        self.acting: list[str] = []
        self.feed(dom)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        self.acting += [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_light_or_dark_as_its_reader_has_it(tmp_path: Path) -> None:
    main(tmp_path)
    for name, is_dark in PICTURES.items():
        size, corner = size_and_corner((tmp_path / name).read_bytes())
        assert size == size_and_corner((ROOT / "docs/assets" / name).read_bytes())[0], "make pictures"
        assert (max(corner) < 64) if is_dark else (min(corner) > 192)
    guide = (ROOT / "docs/production.md").read_text()
    for name in PICTURES:
        assert f"assets/{name}" in guide


def test_hundreds_of_replicas_fit_on_a_page() -> None:
    with shown(large(200)) as address:
        found = Found(chromium(address, "--dump-dom"))
    assert found.elements["svg"] == 200
    assert "10.1.0.199:8500" in found.text
    assert "and 12 more" in found.text, "of 24 reasons as many as one reads"
    assert found.elements["li"] == 13
    assert not {"script", "link", "img", "iframe"} & found.elements.keys()


def test_a_page_of_hundreds_is_no_longer_than_it_needs_to_be() -> None:
    level = plot([0.0] * 600)
    assert level["path"] == "M1 46.0L600 46.0"
    steps = plot([0.0, 0.0, 0.0, 2.0, 2.0, 2.0, None, 0.0])
    assert steps["path"] == "M593 46.0L595 46.0L596 2.0L598 2.0M600 46.0"


EVIL = '"><script>document.title="pwned"</script><img src=x onerror="document.title=1">'
ODD = {
    "markup": EVIL,
    "template": "{{ 7 * 7 }} {% raw %}",
    "entities": "&lt;b&gt; &amp; &#60;",
    "right to left": "\u202e\u05d2\u05d3\u05d5\u05dc\u202c",
    "emoji": "🚀 modèle",
    "one long word": "x" * 3000,
    "lines": "first\nsecond\n\nlast",
}


@pytest.mark.parametrize("case", ODD)
def test_names_and_errors_are_text_whatever_they_hold(case: str, tmp_path: Path) -> None:
    text = ODD[case]
    one = replace(replica(f"{text}:8500"), error=text, is_answering=False, model=text)
    version = replace(one.versions[0], message=text)
    model = ModelView(
        text, f"/models/{text}", text, 1, 2, None, (), True, (replace(one, versions=(version,)),)
    )
    journal = Journal()
    journal.write(FleetEvent(EventKind.FAILED, text, text, text))
    with shown(FleetView(NOON, (model,)), journal) as address:
        dom = chromium(address, "--dump-dom")
        picture = tmp_path / "odd.png"
        take_picture(address, picture, dark=True, size=(800, 600))
    found = Found(dom)
    assert not {"script", "img", "b"} & found.elements.keys()
    assert not found.acting
    assert re.search(r"<title>not fresh", dom), "nothing ran"
    assert found.text.count(" ".join(text.split())) >= 7, "it is shown as it is"
    assert size_and_corner(picture.read_bytes())[0] == (800, 600)


@pytest.mark.parametrize("case", ODD)
def test_json_and_metrics_give_them_back_as_they_are(case: str) -> None:
    text = ODD[case]
    one = replace(replica(text), error=text, is_answering=False, model=text)
    model = ModelView(text, text, text, 1, 2, None, (), True, (one,))
    with shown(FleetView(NOON, (model,))) as address:
        with urllib.request.urlopen(f"{address}status.json", timeout=60) as answer:
            (told,) = json.load(answer)["models"]
        with urllib.request.urlopen(f"{address}metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            labels = [sample.labels for family in families for sample in family.samples]
    assert (told["name"], told["problem"], told["replicas"][0]["error"]) == (text, text, text)
    assert {"model": text, "replica": text} in labels


def test_what_is_usual_is_told() -> None:
    with shown(usual()) as address:
        found = Found(chromium(address, "--dump-dom"))
    for text in ("Every replica is fresh", "10.0.3.17:8500", "48200", "2.4 s ago", "served 60 ms after"):
        assert text in found.text
