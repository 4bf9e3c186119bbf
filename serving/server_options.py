"""The options of a model server as a value, for the command line and for Python."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from exporter.errors import UsageError
from serving.inference import DEFAULT_INFERENCE, Inference
from serving.loader import DEFAULT_LOADING, Loading
from serving.network_options import GRPC_ALONE, NetworkOptions


class ServerOptions(Struct, frozen=True, kw_only=True):
    """How a `ModelServer` listens, finds versions, loads them and answers."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 0
    """The TCP port for gRPC; 0 takes a free one."""
    grpc_socket_path: Path | None = None
    """A UNIX socket to listen on, too."""
    grpc_channel_arguments: tuple[tuple[str, int | str], ...] = ()
    """More arguments of the gRPC server, by gRPC's names."""
    threads: int = 8
    """How many gRPC calls are worked on at a time."""
    poll_seconds: float = 1.0
    """How often base paths are listed; 0 lists each of them once."""
    model_config_file: Path | None = None
    """A `ModelServerConfig` as text; the models in it are served."""
    model_config_poll_seconds: float = 0.0
    """How often that file is read again; 0 reads it once."""
    labels_unavailable_versions: bool = False
    """Take labels that are new for versions that are not available yet."""
    network: NetworkOptions = GRPC_ALONE
    """REST, metrics, TLS, and how to end."""
    loading: Loading = DEFAULT_LOADING
    """How versions are loaded."""
    inference: Inference = DEFAULT_INFERENCE
    """How requests are answered."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: a number is out of range.
        """
        if self.poll_seconds < 0 or self.threads < 1 or not 0 <= self.port <= 65535:
            raise UsageError("poll_seconds must not be negative, threads positive, and port within 0..65535")


DEFAULT_OPTIONS = ServerOptions()
