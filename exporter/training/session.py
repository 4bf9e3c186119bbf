"""`MonitoredTrainingSession` with increments: the stock one, plus the arguments that DeepRec has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exporter.errors import UsageError
from exporter.training.event_time import EventTime
from exporter.training.hook import IncrementHook, schedule


def MonitoredTrainingSession(
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Any = None,
    hooks: Iterable[Any] | None = None,
    *,
    save_increment_secs: float | None = None,
    save_increment_steps: int | None = None,
    save_incremental_checkpoint_secs: float | None = None,
    incremental_save_restore: bool = False,
    event_time: EventTime | None = None,
    **stock: Any,
) -> Any:
    """`tf.compat.v1.train.MonitoredTrainingSession` with an `IncrementHook`; `stock` are its other arguments.

    It takes a scaffold, and a saver, of one's own as the stock session does. Without an argument that asks
    for increments it is the stock session.

    Raises:
        UsageError: increments are asked for and something that they need is off.
    """
    import tensorflow as tf

    every_hook = list(hooks or ())
    given = (save_increment_secs, save_incremental_checkpoint_secs)
    if any(value is not None for value in (*given, save_increment_steps)):
        secs, steps = schedule(*given, steps=save_increment_steps)
        _check_full_checkpoints(checkpoint_dir, stock, every_hook)
        every_hook.append(
            IncrementHook(
                checkpoint_dir or "",
                secs,
                steps,
                is_chief=is_chief,
                incremental_save_restore=incremental_save_restore,
                event_time=event_time,
            )
        )
    elif incremental_save_restore:
        raise UsageError(
            "incremental_save_restore is on, and nothing writes increments",
            hint="say how often: save_incremental_checkpoint_secs=60, or save_increment_steps=1000",
        )
    return tf.compat.v1.train.MonitoredTrainingSession(
        master, is_chief, checkpoint_dir, scaffold, every_hook, **stock
    )


def _check_full_checkpoints(checkpoint_dir: str | None, stock: dict[str, Any], hooks: list[Any]) -> None:
    import tensorflow as tf

    if not checkpoint_dir:
        raise UsageError("increments need a checkpoint_dir", hint="give MonitoredTrainingSession one")
    given = [stock[name] for name in ("save_checkpoint_secs", "save_checkpoint_steps") if name in stock]
    savers = (*hooks, *(stock.get("chief_only_hooks") or ()))
    is_off = bool(given) and not any(given)  # the stock session saves by default
    if is_off and not any(isinstance(hook, tf.compat.v1.train.CheckpointSaverHook) for hook in savers):
        raise UsageError(
            "increments need full checkpoints, which are turned off",
            hint="give save_checkpoint_secs or save_checkpoint_steps a number",
        )
