"""A model server's configuration file, read at start and then periodically."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.errors import UsageError, printable
from serving.model_config import ModelConfig, listed_models, read_config_file
from serving.status import Code, StatusError

if TYPE_CHECKING:
    from serving.models import ServedModels

_log = logging.getLogger(__name__)


class ConfigFile:
    """A file that lists the models to serve; `follow` reads it every `poll_seconds`, unless that is 0."""

    def __init__(self, path: Path, poll_seconds: float = 0.0) -> None:
        self.path = path
        self._poll_seconds = poll_seconds
        self._stopping = threading.Event()
        self._problem = ""

    def read(self, *, may_be_empty: bool = True) -> tuple[ModelConfig, ...]:
        """The models that the file lists.

        Raises:
            UsageError: it cannot be read, or lists a model that cannot be served.
        """
        try:
            config = read_config_file(self.path)
            if not may_be_empty and config.WhichOneof("config") is None:
                raise StatusError(Code.FAILED_PRECONDITION, "it no longer holds a model_config_list")
            return listed_models(config)
        except StatusError as error:
            raise UsageError(
                f"{self.path}: {error.message}", cause=error.code.name, hint="correct the file"
            ) from error

    def follow(self, models: ServedModels) -> None:
        """Apply the file's content each time it is read, until `stop`, as TF Serving does.

        A configuration that cannot be applied changes nothing, and is logged once.
        """
        if self._poll_seconds > 0:
            name = f"models of {self.path.name}"
            threading.Thread(target=self._follow, args=(models,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop reading the file."""
        self._stopping.set()

    def _follow(self, models: ServedModels) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                models.configure(self.read(may_be_empty=False))
                problem = ""
            except UsageError as error:
                problem = f"{error.message} ({error.cause})"
            except StatusError as error:
                problem = f"{error.code.name}: {error.message}"
            if problem and problem != self._problem:
                _log.warning("the configuration is unchanged: %s", printable(problem))
            self._problem = problem
