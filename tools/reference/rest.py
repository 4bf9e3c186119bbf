"""How REST of `serve-model run` compares with TensorFlow Serving's: statuses of HTTP, and the rest."""

from __future__ import annotations

from msgspec import Struct

from tools.reference.markdown import code, table, text


class HttpOutcome(Struct, frozen=True):
    """The status that a request ends in under a condition, there and here."""

    request: str
    when: str
    there: int
    here: int
    why: str = ""


_PREDICT, _EXAMPLES, _GET, _ANY = "POST ...:predict", "POST ...:classify, :regress", "GET ...", "any"


def _same(request: str, when: str, status: int) -> HttpOutcome:
    return HttpOutcome(request, when, status, status)


HTTP_OUTCOMES = (
    _same(_PREDICT, "the body is empty, no JSON, or no object", 400),
    _same(_PREDICT, "neither `instances` nor `inputs`, or both", 400),
    _same(_PREDICT, "a row lacks an input, or has one that the signature lacks", 400),
    _same(_PREDICT, "`inputs` has more than the signature wants", 200),
    _same(_PREDICT, "`inputs` lacks one", 400),
    _same(_PREDICT, "lists of unequal length", 400),
    _same(_PREDICT, "a value of another type, or an integer that its type cannot hold", 400),
    _same(_PREDICT, "a number that float32 rounds, or that is too large for it: infinity", 200),
    _same(_PREDICT, "what nobody reads is nested deeply", 200),
    HttpOutcome(_PREDICT, "text behind the object", there=200, here=400, why="a client's mistake"),
    _same(_PREDICT, "`signature_name` is not known, or no string", 400),
    _same(_PREDICT, "the model's own check fails", 400),
    _same(_PREDICT, "computing takes longer than `--rest_api_timeout_in_ms`", 504),
    HttpOutcome(
        _PREDICT,
        "the body has more than 512 MiB, as sent or unpacked",
        there=200,
        here=413,
        why="a request is in memory as a whole",
    ),
    _same(_EXAMPLES, "no `examples`, or none in it", 400),
    _same(_EXAMPLES, "a feature with values of several types", 400),
    _same(_EXAMPLES, "the signature is not known", 400),
    _same(_GET, "the model, or the version, is not served", 404),
    _same(_GET, "the label is not known", 400),
    _same(_GET, "no model is named", 400),
    _same(_ANY, "another path, method or verb below `/v1/`", 400),
    _same(_ANY, "a path elsewhere", 404),
    _same(_ANY, "OPTIONS without `Origin`", 400),
)
"""A test makes each of these requests."""

_DIFFERENCES = (
    ("layout", "one line; there indented"),
    ("float32 in answers", "the shortest digits that mean it: 0.33333334; there up to nine: 0.333333343"),
    (
        "strings in answers that are not UTF-8, of outputs not called `..._bytes`",
        "400; there the bytes as they are, which is no JSON",
    ),
    ("numbers beyond int8, uint8 or int16 in requests", "400; there other numbers of that type"),
    ("`Inf` and `-Inf` in requests", "no JSON; as there, `NaN`, `Infinity` and `-Infinity` are numbers"),
    (
        "types that have no JSON there: float16, bfloat16, uint16, complex and quantised ones, and more",
        "as there, values of them in requests are refused with 400 by rows and 501 by columns, values in "
        "answers with 400; `[]`, which has no value, is taken. gRPC carries them",
    ),
    (
        "base64 in requests",
        "as there, of the standard alphabet alone, with white space anywhere, and with all of its padding, "
        "of `=` or `.`, or none",
    ),
    (
        "`Host`",
        "403 unless it is an address, `localhost`, `--host` or in `--allow-host`, or a name without a dot "
        "where the port is not on a loopback address; there any",
    ),
    (
        "what a page of another site sends without asking first: `Origin` or `Sec-Fetch-Site` says so, and "
        "the type is not `application/json`",
        "403 without `--rest_api_enable_cors_support`; there it is computed",
    ),
    ("a key that an object has twice", "the last counts; there the first"),
    ("bytes in requests that are not UTF-8", "400; there taken as they are"),
    ("paths that begin with `//v1/`", "404, as of any other path; there `v1` is taken for a host's name"),
    (
        "a header that goes on in the next line; `Transfer-Encoding` with `Content-Length`, or in HTTP/1.0; "
        "HTTP of another version than 1",
        "400, 400, and 505",
    ),
    ("the body of a 404 for a path elsewhere", '`{"error": ...}`; there a page in HTML'),
    ("TLS", "of the gRPC port alone, as there"),
    (
        "limits of the port",
        "headers of 64 KiB (431); 60 s for a request to come or its answer to be taken, and a second more "
        "for each 256 KiB (408); 1,000 connections, of which the first goes that has sent no whole request; "
        "1 GiB of bodies and answers of all clients (503). Threads get whole requests; status and metrics "
        "have two threads of their own",
    ),
    (
        "metrics",
        "`:tensorflow:serving:request_count` (untyped) and `:tensorflow:serving:request_latency`; the others "
        "are absent. Also `export_model_server_version_state`, `..._position` and `..._step`",
    ),
)

_ABOUT_BODIES = """
Bodies may be packed with gzip, as there; answers are not. An error is `{"error": "..."}`. What differs:

"""


def section() -> str:
    """The part of the page about REST."""
    outcomes = (
        (
            code(found.request),
            text(found.when),
            "same" if found.there == found.here else str(found.there),
            str(found.here),
            text(found.why),
        )
        for found in HTTP_OUTCOMES
    )
    differences = table(("what", "here"), ((text(what), text(here)) for what, here in _DIFFERENCES))
    return table(("request", "when", "there", "here", "why"), outcomes) + _ABOUT_BODIES + differences
