"""Golden requests: files that are refused, and what answers pass or not, compared with those before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import UsageError
from exporter.terminal.server_access import WITHOUT_TLS
from exporter.verify.golden import Answer, Expectation, Gates, GoldenRequest, check_signatures, read_golden
from exporter.wire.dtypes import DType
from serving.agent.canary_keeper import canary_rules
from tests.support.updatable import Model, updatable_model

NAN, INF = float("nan"), float("inf")


def request(**expect: Expectation) -> GoldenRequest:
    return GoldenRequest("r", inputs={}, expect=expect)


def answer(*values: float, dtype: Any = np.float32) -> Answer:
    return Answer({"y": np.array(values, dtype)})


NEAR = Expectation(near=[1.0, 2.0], tolerance=0.5)
REFUSED = Answer(refused="no such row")
CASES: dict[str, tuple[GoldenRequest, Answer, Answer | None, float | None, list[str]]] = {
    "finite": (request(), answer(1, 2), None, None, []),
    "not a number": (request(), answer(1, NAN), answer(1, 2), None, ["finite"]),
    "infinite": (request(), answer(-INF), None, None, ["finite"]),
    "not a number before, either": (request(), answer(NAN), answer(NAN), None, []),
    "bfloat16 too": (request(), answer(NAN, dtype=DType.BFLOAT16.numpy), None, None, ["finite"]),
    "integers are finite": (request(), answer(1, dtype=np.int64), None, None, []),
    "an output that nobody asked about": (
        request(),
        Answer({"y": np.float32([1]), "z": np.float32([NAN])}),
        None,
        None,
        ["finite"],
    ),
    "within": (request(y=Expectation(min=0, max=2)), answer(0, 2), None, None, []),
    "below": (request(y=Expectation(min=0)), answer(-0.1, 2), None, None, ["range"]),
    "above": (request(y=Expectation(max=2)), answer(0, 2.5), None, None, ["range"]),
    "above before, too": (request(y=Expectation(max=2)), answer(9), answer(3), None, []),
    "integers have ranges": (request(y=Expectation(max=2)), answer(3, dtype=np.int32), None, None, ["range"]),
    "near": (request(y=NEAR), answer(1.4, 1.6), None, None, []),
    "not near": (request(y=NEAR), answer(1.4, 2.6), None, None, ["range"]),
    "near one number": (request(y=Expectation(near=1, tolerance=0)), answer(1, 1), None, None, []),
    "another shape": (request(y=NEAR), answer(1), None, None, ["range"]),
    "no such output": (request(x=NEAR), answer(1, 2), None, None, ["range"]),
    "text has no range": (request(y=NEAR), Answer({"y": np.array([b"a"], object)}), None, None, ["range"]),
    "text is not compared": (request(), Answer({"y": np.array([b"a"], object)}), answer(1), 0.1, []),
    "refused": (request(), REFUSED, answer(1), None, ["answer"]),
    "refused before, too": (request(), REFUSED, REFUSED, 0.1, []),
    "answered again": (request(), answer(1), REFUSED, 0.1, []),
    "no drift": (request(), answer(1.1, 2.1), answer(1, 2), 0.1, []),
    "drift": (request(), answer(1.5, 2.5), answer(1, 2), 0.1, ["drift"]),
    "drift in sign alone": (request(), answer(-1, -2), answer(1, 2), 1.0, ["drift"]),
    "drift where nobody looks": (request(), answer(9), answer(1), None, []),
    "drift, and the request allows more": (request(y=Expectation(drift=2)), answer(2), answer(1), 0.1, []),
    "drift, and the request allows less": (
        request(y=Expectation(drift=0.1)),
        answer(2),
        answer(1),
        9,
        ["drift"],
    ),
    "drift from zeros says nothing": (request(), answer(1), answer(0), 0.1, []),
    "drift from what is no number": (request(), answer(1), answer(NAN), 0.1, []),
    "drift of a range that was wrong before": (
        request(y=Expectation(max=0)),
        answer(9),
        answer(1),
        0.1,
        ["drift"],
    ),
    "another shape than before": (request(), answer(1, 2), answer(1), 0.1, ["drift"]),
    "nothing to compare with": (request(), answer(9), None, 0.1, []),
    "no values": (request(), answer(), answer(), 0.1, []),
}


@pytest.mark.parametrize("name", CASES)
def test_gates(name: str) -> None:
    asked, now, before, drift, expected = CASES[name]
    found = Gates((asked,), drift).failures([now], None if before is None else [before])
    assert [failure.gate for failure in found] == expected
    assert all(failure.text and str(failure).startswith("r") for failure in found)


def test_a_request_that_always_failed_hides_no_other() -> None:
    gates = Gates((request(y=Expectation(max=0)), GoldenRequest("s", inputs={})))
    assert [f.request for f in gates.failures([answer(1), answer(NAN)], [answer(1), answer(1)])] == ["s"]
    assert [f.request for f in gates.wrong([answer(1), answer(1)])] == ["r"]


def test_a_file_is_read_and_requests_without_a_name_get_one(tmp_path: Path) -> None:
    rows = [{"user": 7}]
    path = written(
        tmp_path, {"instances": rows}, {"name": "b", "inputs": {"user": [7]}, "signature_name": "s"}
    )
    first, second = read_golden(path)
    assert (first.name, first.signature_name, first.document) == (
        "request 1",
        "serving_default",
        {"instances": rows},
    )
    assert (second.name, second.signature_name, second.document) == ("b", "s", {"inputs": {"user": [7]}})


def written(tmp_path: Path, *requests: dict[str, Any]) -> Path:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"requests": requests}))
    return path


ROW: dict[str, Any] = {"instances": [1]}
WRONG_FILES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "truncated"),
    "a list": ("[]", "object"),
    "no requests": ('{"requests": []}', "no requests"),
    "an unknown field": ('{"requests": [{"instance": [1]}]}', "instance"),
    "neither form": ('{"requests": [{"name": "a"}]}', "either 'instances' or 'inputs'"),
    "endless lists": ('{"requests": [{"instances": ' + "[" * 100_000, "recursion"),
    "both forms": ('{"requests": [{"instances": [1], "inputs": [1]}]}', "either 'instances' or 'inputs'"),
}
WRONG_EXPECTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown gate": ({"minimum": 1}, "minimum"),
    "another type": ({"min": "1"}, "expect"),
    "near without tolerance": ({"near": 1}, "go together"),
    "tolerance without near": ({"tolerance": 1}, "go together"),
    "near is text": ({"near": "x", "tolerance": 1}, "not a number"),
    "near is ragged": ({"near": [[1], [1, 2]], "tolerance": 1}, "not a number"),
    "a negative tolerance": ({"near": 1, "tolerance": -1}, "negative"),
    "a negative drift": ({"drift": -1}, "negative"),
    "min above max": ({"min": 2, "max": 1}, "above"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_a_usage_error(tmp_path: Path, name: str) -> None:
    content, message = WRONG_FILES[name]
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="cannot be used") as caught:
        read_golden(path)
    assert message in caught.value.cause


@pytest.mark.parametrize("name", WRONG_EXPECTATIONS)
def test_a_wrong_expectation_is_a_usage_error(tmp_path: Path, name: str) -> None:
    expected, message = WRONG_EXPECTATIONS[name]
    with pytest.raises(UsageError) as caught:
        read_golden(written(tmp_path, {**ROW, "expect": {"y": expected}}))
    assert message in caught.value.cause


def test_two_requests_of_one_name_and_a_missing_file_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_golden(written(tmp_path, {"name": "a", **ROW}, {"name": "a", **ROW}))
    with pytest.raises(UsageError):
        read_golden(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return updatable_model(tmp_path_factory.mktemp("golden"))


def fitting(model: Model) -> dict[str, Any]:
    """A request that the model's default signature takes."""
    from exporter.wire.protos import message_class

    saved = message_class("SavedModel").FromString((model.version / "saved_model.pb").read_bytes())
    inputs = saved.meta_graphs[0].signature_def["serving_default"].inputs
    return {"inputs": {name: [0] for name in inputs}}


def test_requests_are_compared_with_the_signatures_of_what_is_published(model: Model, tmp_path: Path) -> None:
    good = fitting(model)
    check_signatures(read_golden(written(tmp_path, good)), model.version)
    for wrong, message in (
        ({**good, "signature_name": "other"}, "no signature 'other'"),
        ({**good, "expect": {"nothing": {"min": 0}}}, "no output 'nothing'"),
        ({"inputs": {"nothing": [1]}}, "nothing"),
        ({"inputs": {name: ["x"] for name in good["inputs"]}}, "expected"),
    ):
        with pytest.raises(UsageError, match="does not fit") as caught:
            check_signatures(read_golden(written(tmp_path, wrong)), model.version)
        assert message in caught.value.cause
    with pytest.raises(UsageError, match="no signatures"):
        check_signatures((), tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"\xff" * 9)
    with pytest.raises(UsageError, match="no signatures"):
        check_signatures((), tmp_path)


def test_a_canary_does_not_begin_with_requests_that_no_server_can_answer(
    ranker_graph: Path, tmp_path: Path
) -> None:
    wrong = written(tmp_path, {**ROW, "signature_name": "other"})
    with pytest.raises(UsageError, match="does not fit"):
        canary_rules(
            [str(wrong)],
            {"m": ranker_graph.parent},
            drift=None,
            patience_s=1,
            deadline_s=1,
            access=WITHOUT_TLS,
        )


def test_options_name_a_model_where_there_are_several(tmp_path: Path) -> None:
    file = written(tmp_path, ROW)
    nowhere = {"a": tmp_path / "a", "b": tmp_path / "b"}

    def rules(*options: str, models: dict[str, Path] = nowhere) -> set[str]:
        return set(canary_rules(options, models, drift=None, patience_s=1, deadline_s=1, access=WITHOUT_TLS))

    assert rules(f"b={file}") == {"b"}
    assert rules(f"b={file}", f"a={file}") == {"a", "b"}
    assert rules(str(file), models={"a": tmp_path / "a"}) == {"a"}
    for options in ([str(file)], [f"c={file}"], [f"a={file}", f"a={file}"]):
        with pytest.raises(UsageError):
            rules(*options)
