"""gRPC's health service (grpc.health.v1), for probes: `grpc_health_probe`, Kubernetes, load balancers.

The service `""` and TF Serving's own services are SERVING when every model has an available version; a
model's name is a service, too. `Watch` is not there: it would hold a thread for each client, and gRPC's
clients take UNIMPLEMENTED for healthy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import grpc

from exporter.wire.protos import Proto
from serving.models import ServedModels

_SERVICE = "grpc.health.v1.Health"
_WHOLE_SERVER = ("", "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")
SERVING, NOT_SERVING = 1, 2


class Health:
    """What health checks are told beside the models' states: a server that is about to end serves nobody."""

    is_ending = False


def add_health_service(server: grpc.Server, models: ServedModels, health: Health) -> None:
    """Register the health service."""
    request, response = messages()

    def check(asked: Proto, context: grpc.ServicerContext) -> Proto:
        if asked.service not in _WHOLE_SERVER and asked.service not in models.served():
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service: {asked.service}")
        is_available = models.is_available(None if asked.service in _WHOLE_SERVER else asked.service)
        return response(status=SERVING if is_available and not health.is_ending else NOT_SERVING)

    handler = grpc.unary_unary_rpc_method_handler(
        check, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Check": handler}),))


@cache
def messages() -> tuple[Any, Any]:
    """The classes of HealthCheckRequest and HealthCheckResponse (source: grpc/health/v1/health.proto)."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    states = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        states.value.add(name=name, number=number)
    status = response.field.add(name="status", number=1, type=field.TYPE_ENUM, label=field.LABEL_OPTIONAL)
    status.type_name = ".grpc.health.v1.HealthCheckResponse.ServingStatus"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    classes = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("HealthCheckRequest", "HealthCheckResponse")
    ]
    return classes[0], classes[1]
