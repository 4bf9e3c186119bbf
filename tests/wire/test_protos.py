"""Classes of messages of the private pool."""

from __future__ import annotations

import gc
import weakref

from exporter.wire.protos import message_class


def test_the_class_of_a_message_inside_another_is_never_collected() -> None:
    """A server died of SIGSEGV when a collection cleared the class that a call in another thread just got."""
    request = message_class("serving.PredictRequest")()
    inside = weakref.ref(type(request.model_spec))
    del request
    gc.collect()
    assert inside() is not None
