"""Ask a staged version golden requests, in TensorFlow's own loader: what does not pass is not published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporter.errors import VerificationError
from exporter.golden import Answer, Gates, GoldenRequest, told
from exporter.graph.signatures import tensor_names
from exporter.storage import mirror
from exporter.wire.rest_json import predict_inputs

_LONGEST = 500


def require_golden(bundle: Path, requests: Sequence[GoldenRequest]) -> None:
    """Refuse a version whose answers to some requests do not pass by themselves.

    Raises:
        VerificationError: which requests, and why; or the version cannot be loaded.
    """
    if not requests:
        return
    failures = Gates(tuple(requests)).wrong(_ask(bundle, requests))
    if failures:
        raise VerificationError(
            "the version does not pass the golden requests",
            cause=told(failures),
            hint="mend the model or the file of --golden; nothing was published",
        )


def _ask(bundle: Path, requests: Sequence[GoldenRequest]) -> tuple[Answer, ...]:
    import tensorflow as tf

    mirror.fetch_below(bundle)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        try:
            loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(bundle))
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise VerificationError(
                "the version cannot be loaded for --golden", cause=_text(error)
            ) from error
        return tuple(_answer(session, loaded.signature_def, request) for request in requests)


def _answer(session: Any, signatures: Any, request: GoldenRequest) -> Answer:
    import tensorflow as tf

    if request.signature_name not in signatures:
        return Answer(refused=f"there is no signature {request.signature_name!r}")
    signature = signatures[request.signature_name]
    try:
        inputs = predict_inputs(request.document, signature)
        feeds = {signature.inputs[name].name: value for name, value in inputs.items()}
        fetches = {name: tensor_names(info)[0] for name, info in signature.outputs.items()}
        found = session.run(fetches, feeds)
    except (tf.errors.OpError, ValueError) as error:
        return Answer(refused=_text(error))
    return Answer({name: np.asarray(value) for name, value in found.items()})


def _text(error: Exception) -> str:
    text = str(getattr(error, "message", error)).strip().removeprefix("Graph execution error:")
    return text.strip()[:_LONGEST]
