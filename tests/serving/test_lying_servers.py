"""Whatever a server answers, a client's values are those of a model server, or one error says otherwise."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CallFailed, Exit
from exporter.publish.delta_log import read_log
from exporter.verify.golden import Expectation, Gates, GoldenRequest
from exporter.wire.tensor_proto import fill
from serving.agent.audit import audit
from serving.agent.canary_keeper import ask_golden
from serving.agent.rollout import Audit
from serving.cli import app
from serving.client import ModelClient
from serving.updates import call_until_there, read_incremental_status, read_served
from tests.support.commands import run_app
from tests.support.logs import Serving, Trainer, publish_base
from tests.support.lying_server import MODELS, PREDICTION, LyingServer, lies, lying_server

PREDICT, METADATA = f"{PREDICTION}/Predict", f"{PREDICTION}/GetModelMetadata"
STATUS, RELOAD = f"{MODELS}/GetModelStatus", f"{MODELS}/HandleReloadConfigRequest"
Command = tuple[str, ...]
ASK: Command = ("predict", "--json-input", "request.json")
# Each RPC and signature, with the commands that call it.
CALLED: dict[tuple[str, str], tuple[Command, ...]] = {
    (PREDICT, "serving_default"): (ASK,),
    (PREDICT, "incremental_status"): (("status",),),
    (PREDICT, "incremental_update"): (("update",),),
    (f"{PREDICTION}/Classify", ""): ((*ASK[:2], "classify.json"),),
    (f"{PREDICTION}/Regress", ""): ((*ASK[:2], "regress.json"),),
    (METADATA, ""): (ASK, ("predict", "--example"), ("status",), ("update",)),
    (STATUS, ""): (("status",), ("update",)),
    (RELOAD, ""): (("reload", "--model-config-file", "models.config"),),
}
MOST_BYTES = 200 << 20
"""By how much a process may grow in one test: the lies ask for gigabytes."""


@pytest.fixture(scope="module")
def server() -> Iterator[LyingServer]:
    with lying_server() as lying:
        yield lying


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("request.json").write_text(json.dumps({"inputs": {"x": [1.0]}}))
    for kind in ("classify", "regress"):
        Path(f"{kind}.json").write_text(json.dumps({"signature_name": kind, "examples": [{"a": 1.0}]}))
    Path("models.config").write_text(
        'model_config_list { config { name: "m" base_path: "/m" model_platform: "tensorflow" } }'
    )


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("path", "signature"), CALLED, ids=lambda it: it.rpartition("/")[2])
def test_every_lie_ends_in_values_or_in_a_named_error(path: str, signature: str, server: LyingServer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server.path, server.signature = path, signature
    bad = []
    for name, lie in [("the truth", None), *lies(path, signature)]:
        server.lie = lie
        for command in CALLED[path, signature]:
            server.told = 0
            named = () if command[0] == "reload" else ("--model-name", "m")
            ran = run_app(app, command[0], server.address, *named, *command[1:], "--deadline", "5")
            is_named = ran.code == 0 or "error: " in ran.err
            if ran.code not in set(Exit) or "unexpected" in ran.err or "Traceback" in ran.err or not is_named:
                bad.append((name, command, ran.code, ran.err[-300:]))
            elif any(ord(c) < 32 and c != "\n" for c in ran.err):
                bad.append((name, command, "control characters", ran.err[-300:]))
            elif lie is None and ran.code:
                bad.append((name, command, ran.code, ran.err))
            elif lie is not None and not server.told:
                bad.append((name, command, "was not asked", ""))
    assert not bad, (len(bad), bad[:20])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES


def test_an_agent_reads_lies_as_its_client_does(server: LyingServer, tmp_path: Path) -> None:
    """Audits, golden requests and the gates that compare their answers."""
    trainer, model = Trainer(tmp_path / "train", step=7), tmp_path / "model"
    trainer.save()
    publish_base(trainer, Serving(), model)
    at = Audit(7, read_log(model).lineage, 7)
    expect = {"y": Expectation(min=0, max=1, drift=0.1)}
    requests = (GoldenRequest(inputs={"x": [1.0]}, expect=expect),)
    gates = Gates(requests, drift=0.1)
    with ModelClient(server.address, "m", deadline_s=5) as client:
        server.lie = None
        assert audit(client, model, at, 1).chunks == 1
        before = ask_golden(client, requests, 7)
        assert not gates.wrong(before)
        server.path, server.signature = PREDICT, "incremental_digest"
        for name, lie in lies(PREDICT, "incremental_digest"):
            server.lie = lie
            with suppress(CallFailed):
                assert audit(client, model, at, 1), name
        server.signature = "serving_default"
        for _, lie in lies(PREDICT, "serving_default"):
            server.lie = lie
            with suppress(CallFailed):
                answers = ask_golden(client, requests, 7)
                gates.failures(answers, before)
                gates.failures(before, answers)


def test_signatures_are_read_again_only_if_a_known_version_does_not_tell_its_position() -> None:
    """An agent asks each server every few seconds; a version of that number may have become another one."""
    with lying_server() as lying, ModelClient(lying.address, "m", deadline_s=5) as client:
        answer, asked = lying.answer, list[str]()
        takes_deltas = True

        def counted(path: str, content: bytes) -> bytes:
            asked.append(path)
            if path == PREDICT and not takes_deltas:
                raise LookupError("there is no such signature")
            return answer(path, content)

        lying.answer = counted  # type: ignore[method-assign]
        (status,) = client.status()
        first = read_served(client, status)
        assert (first.position, asked) == (7, [STATUS, METADATA, PREDICT])
        asked.clear()
        assert (read_served(client, status, [first]), asked) == (first, [PREDICT])
        takes_deltas = False
        asked.clear()
        with pytest.raises(CallFailed):
            read_served(client, status, [first])
        assert asked == [PREDICT, METADATA, PREDICT]


@pytest.mark.parametrize("signature", ["incremental_status", "incremental_update"])
def test_numbers_in_place_of_texts_are_no_texts(server: LyingServer, signature: str) -> None:
    def numbers(answer: Any) -> bytes:
        for name in {"lineage", "status"} & set(answer.outputs):
            tensor = answer.outputs[name]
            tensor.Clear()
            fill(tensor, np.array([3]))
        return bytes(answer.SerializeToString())

    server.path, server.signature, server.lie = PREDICT, signature, numbers
    try:
        with ModelClient(server.address, "m") as client, pytest.raises(CallFailed, match="otherwise than"):
            if signature == "incremental_status":
                read_incremental_status(client, 7)
            else:
                call_until_there(client, 7, 7)
    finally:
        server.lie = None
