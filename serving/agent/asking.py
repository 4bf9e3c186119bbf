"""Ask a model server golden requests."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.errors import CallFailed
from exporter.golden import Answer, GoldenRequest
from exporter.wire.rest_json import predict_inputs
from serving.client import ModelClient

_REFUSALS = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL", "UNIMPLEMENTED", "OUT_OF_RANGE"}
)
"""Codes that answer a request; any other tells of the server, or of the way there."""


def ask(client: ModelClient, requests: Sequence[GoldenRequest], version: int) -> tuple[Answer, ...]:
    """Each request's answer by a version.

    Raises:
        CallFailed: the server did not answer, or does not have the version any more.
    """
    signatures = client.metadata(version).signatures
    answers = []
    for request in requests:
        signature = signatures.get(request.signature_name)
        if signature is None:
            answers.append(Answer(refused=f"there is no signature {request.signature_name!r}"))
            continue
        try:
            inputs = predict_inputs(request.document, signature)
            found = client.predict(inputs, signature=request.signature_name, version=version)
            answers.append(Answer(found.outputs))
        except ValueError as error:
            answers.append(Answer(refused=str(error)))
        except CallFailed as error:
            if error.code not in _REFUSALS:
                raise
            answers.append(Answer(refused=error.cause or error.message))
    return tuple(answers)
