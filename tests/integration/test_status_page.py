"""The status page in a real browser: light and dark, hundreds of replicas, whatever names and errors hold."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from exporter.errors import printable
from exporter.publish.judge import Code
from serving.agent.http import plot
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.standing import assess
from serving.agent.view import FleetView, ModelView
from tests.support.budget import THOROUGH
from tests.support.printed_documents import checked
from tests.support.status_pages import (
    CHROMIUM,
    NOON,
    PICTURES,
    SCREENS,
    chromium,
    large,
    main,
    replica,
    scenes,
    shown,
    size_and_corner,
    take_picture,
    take_pictures,
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
        self.classes: dict[str, list[str]] = {}
        self.feed(dom)
        self.text = " ".join(" ".join(self.texts).split())

    def classes_of(self, tag: str) -> list[str]:
        """The classes of the last element of a kind."""
        return self.classes.get(tag, [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        self.classes[tag] = (dict(attrs).get("class") or "").split()
        self.acting += [
            name
            for name, value in attrs
            if name.startswith("on")
            or (name in ("href", "src") and not re.fullmatch(r"findings#[a-z-]+", value or ""))
        ]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_light_or_dark_as_its_reader_has_it(tmp_path: Path) -> None:
    main(tmp_path)
    for name, is_dark in PICTURES.items():
        size, corner = size_and_corner((tmp_path / name).read_bytes())
        assert size == size_and_corner((ROOT / "docs/assets" / name).read_bytes())[0], "make pictures"
        assert (max(corner) < 64) if is_dark else (min(corner) > 192)
    guide = (ROOT / "docs/monitoring.md").read_text()
    for name in PICTURES:
        assert f"assets/{name}" in guide


def test_hundreds_of_replicas_fit_on_a_page() -> None:
    with shown(large(200)) as address:
        found = Found(chromium(address, "--dump-dom"))
    assert found.elements["svg"] == 200 + 4, "of each replica, and the chart"
    assert "10.1.0.199:8500" in found.text
    assert (
        "4 of 200 replicas are down: 10.1.0.7:8500, 10.1.0.57:8500, 10.1.0.107:8500 and 1 more" in found.text
    )
    assert (
        "20 of 200 replicas are late: 10.1.0.3:8500, 10.1.0.13:8500, 10.1.0.23:8500 and 17 more" in found.text
    )
    assert "176 of 200 fresh" in found.text
    assert not {"link", "img", "iframe"} & found.elements.keys()


def test_a_page_of_hundreds_is_no_longer_than_it_needs_to_be() -> None:
    level = plot([0.0] * 600)
    assert level["path"] == "M1 45L600 45"
    steps = plot([0.0, 0.0, 0.0, 2.0, 2.0, 2.0, None, 0.0])
    assert steps["path"] == "M593 45L595 45L596 3L598 3M600 45"


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
    journal.write(AgentEvent(EventKind.FAILED, text, text, text))
    with shown(FleetView(NOON, (model,)), journal) as address:
        dom = chromium(address, "--dump-dom")
        picture = tmp_path / "odd.png"
        take_picture(address, picture, dark=True, size=(800, 600))
    found = Found(dom)
    assert not {"img"} & found.elements.keys()
    assert found.elements["script"] == 1, "the page's own"
    assert not found.acting
    assert re.search(r"<title>What is published cannot be seen - ", dom), "nothing ran"
    assert found.text.count(" ".join(map(printable, text.split()))) >= 7, "it is shown"
    assert size_and_corner(picture.read_bytes())[0] == (800, 600)


@pytest.mark.parametrize("case", ODD)
def test_json_and_metrics_give_them_back_as_they_are(case: str) -> None:
    text = ODD[case]
    one = replace(replica(text), error=text, is_answering=False, model=text)
    model = ModelView(text, text, text, 1, 2, None, (), True, (one,))
    with shown(FleetView(NOON, (model,))) as address:
        with urllib.request.urlopen(f"{address}status.json", timeout=60) as answer:
            (told,) = checked(json.load(answer))["models"]
        with urllib.request.urlopen(f"{address}metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            labels = [sample.labels for family in families for sample in family.samples]
    assert (told["name"], told["problem"], told["replicas"][0]["error"]) == (text, text, text)
    assert {"model": text, "replica": text} in labels


def test_each_finding_leads_to_what_it_means() -> None:
    with shown(usual()) as address, urllib.request.urlopen(f"{address}findings", timeout=30) as answer:
        text = answer.read().decode()
    assert all(f'<h2 id="{code.value}">' in text for code in Code)
    assert "`" not in text.partition("<body>")[2]
    assert "](" not in text


def test_what_is_usual_is_told() -> None:
    with shown(usual()) as address:
        found = Found(chromium(address, "--dump-dom"))
    for text in (
        "Every replica is fresh",
        "10.0.3.17:8500",
        "48200",
        "2.4 s ago",
        "served after 60 ms to 100 ms",
    ):
        assert text in found.text


@pytest.mark.parametrize(("number", "scene"), enumerate(scenes()))
def test_each_incident_has_its_headline_and_a_picture(number: int, scene: str, tmp_path: Path) -> None:
    """Of one screen; `make pictures` leaves those of all screens in build/pictures, to be looked at."""
    view = scenes()[scene]
    standing = assess(view, 30.0)
    with shown(view) as address:
        with urllib.request.urlopen(address, timeout=60) as answer:
            page = answer.read().decode()
        with urllib.request.urlopen(f"{address}status.json", timeout=60) as answer:
            told = checked(json.load(answer))["findings"]
    assert [finding["text"] for finding in told] == [finding.text for finding in standing.findings]
    found, addresses = Found(page), re.findall('<td class="where"><code[^>]*>(.*?)</code>', page)
    assert standing.headline in found.text
    assert standing.level.on_page in found.classes_of("header")
    assert (standing.level == "good") is (scene in ("two", "thirty"))
    for model in standing.models:
        assert f"{model.fresh} of {len(model.rows)} fresh" in found.text
        rows, addresses = addresses[: len(model.rows)], addresses[len(model.rows) :]
        assert rows == [row.replica.address for row in model.rows]
    screens = list(SCREENS) if THOROUGH else [list(SCREENS)[number % len(SCREENS)]]
    for screen, file in zip(screens, take_pictures(view, scene, tmp_path, screens), strict=True):
        size, corner = size_and_corner(file.read_bytes())
        assert size == SCREENS[screen][0]
        assert (max(corner) < 64) if SCREENS[screen][1] else (min(corner) > 192)


_MEASURE = """<script>parent.postMessage(JSON.stringify({
  wide: document.documentElement.scrollWidth,
  low: [...document.querySelectorAll(".tiles div")].slice(0, 3)
    .map((tile) => tile.getBoundingClientRect().bottom),
}), "*")</script>"""
_PHONE = """<script>onmessage = (message) => { document.title = message.data }</script>
<iframe width="390" height="844" style="border: 0" src="page.html"></iframe>"""


@pytest.mark.parametrize("scene", ["thirty-one-down", "rolled-back", "refused"])
def test_a_phone_sees_position_and_age_without_scrolling(scene: str, tmp_path: Path) -> None:
    """Measured in a frame as large as a phone's screen: windows have a least width."""
    with shown(scenes()[scene]) as address, urllib.request.urlopen(address, timeout=60) as answer:
        page = answer.read().decode()
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{_MEASURE}</body>"))
    phone = tmp_path / "phone.html"
    phone.write_text(_PHONE)
    (title,) = re.findall(r"<title>(.*?)</title>", chromium(phone.as_uri(), "--dump-dom"))
    found = json.loads(html.unescape(title))
    assert found["wide"] <= 390, "nothing is cut off, nothing scrolls sideways"
    assert len(found["low"]) == 3, "position, what is published, age"
    assert max(found["low"]) < 844


class Changing:
    """A fleet that is fresh when the page is first asked for, and held from then on."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> FleetView:
        self.asked += 1
        return scenes()["thirty" if self.asked == 1 else "held"]


def test_the_page_renews_itself_in_place() -> None:
    fleet = Changing()
    with shown(usual(), view=fleet) as address:
        found = Found(chromium(address, "--dump-dom", "--virtual-time-budget=9000"))
    assert fleet.asked >= 3, "by its script"
    assert "Held at 47900: 3 publications wait (newest 48200, serving 47900)" in found.text
    assert "bad" in found.classes_of("header")
    assert found.elements["header"] == 1
    assert found.elements["script"] == 1, "the document is the first one"


def test_without_javascript_the_browser_reloads_the_page() -> None:
    with shown(usual()) as address, urllib.request.urlopen(address, timeout=60) as answer:
        page, allowed = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert '<noscript><meta http-equiv="refresh" content="2"></noscript>' in page
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in allowed, "and no other script runs"
    assert "default-src 'none'" in allowed


def test_an_agent_that_is_gone_leaves_no_green_page() -> None:
    """The page's second look finds nobody: it says so instead of standing still."""
    gone = False

    def view() -> FleetView:
        nonlocal gone
        if gone:
            raise RuntimeError("the agent is gone")
        gone = True
        return usual()

    with shown(usual(), view=view) as address:
        dom = chromium(address, "--dump-dom", "--virtual-time-budget=9000")
    assert re.search(r'<body class="lost">', dom)
    assert "<title>no answer - serve-model agent</title>" in dom
