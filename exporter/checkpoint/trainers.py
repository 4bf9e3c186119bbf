"""Recognise the library that wrote a checkpoint, and the training step, for the report."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.object_graph import ROOT, ObjectGraph, read_object_graph
from exporter.checkpoint.tensor_values import read_step
from exporter.errors import LfsPointer
from exporter.storage.files import regular_file
from exporter.storage.layout import CHECKPOINT_STATE_FILE, SAVED_MODEL_FILE, SAVED_MODEL_FILES

_KERAS_3 = {"_operations", "_functional", "_trainable_variables_indices"}
_KERAS_2 = {"layer-0", "layer_with_weights-0", "keras_api", "_index_dict"}
_STEPS = ("global_step", "step", "train_step")
_ITERATIONS = ("_iterations", "iterations", "iter")
_MANAGER_STATE = b"last_preserved_timestamp"  # in the state file of a CheckpointManager alone
_MAX_STATE_BYTES = 1 << 16

# The prefix of names in a graph that AutoDist has copied for each replica (source: autodist/const.py).
AUTODIST_SCOPE = "AutoDist-Replica-"


def recognise(catalog: Catalog) -> Catalog:
    """Return the catalog with the trainer's family in words, and the step that its object graph states.

    The step stays if there is no object graph, or that states none. CheckpointError and subclasses if the
    object graph or a step is damaged or cannot be read, DiskFull or PublishError if files of a store cannot
    be kept here.
    """
    objects = read_object_graph(catalog)
    if objects is None:
        return replace(catalog, family=_family_by_name(catalog))
    return replace(catalog, family=", ".join(_family(catalog, objects)), step=_step(catalog, objects))


def _family_by_name(catalog: Catalog) -> str:
    directory = catalog.prefix.parent
    if _is_in_saved_model(catalog):
        return "SavedModel's variables, name-based"
    if _holds(catalog.prefix.with_name(f"{catalog.prefix.name}.meta"), AUTODIST_SCOPE.encode()):
        return "AutoDist, name-based"
    # `train_and_evaluate` leaves evaluations or exports beside the checkpoints.
    marks = ("eval*/events.out.tfevents.*", f"export/*/*/{SAVED_MODEL_FILE}")
    if (directory / "graph.pbtxt").is_file() and any(any(directory.glob(mark)) for mark in marks):
        return "Estimator, name-based"
    return catalog.family


def _is_in_saved_model(catalog: Catalog) -> bool:
    return any((catalog.prefix.parent.parent / name).is_file() for name in SAVED_MODEL_FILES)


def _holds(path: Path, text: bytes) -> bool:
    """True if a file holds `text` anywhere; False if it cannot be read, is empty, or is a pointer of Git LFS.

    CheckpointError if it cannot be fetched from a store.
    """
    with (
        suppress(OSError, ValueError, LfsPointer),
        regular_file(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
    ):
        return view.find(text) >= 0
    return False


def _family(catalog: Catalog, objects: ObjectGraph) -> Iterator[str]:
    edges = {name for item in objects.objects for name in item.children}
    root = objects.objects[ROOT].children
    keras = "Keras 3 " if edges & _KERAS_3 else "Keras 2 " if edges & _KERAS_2 else ""
    if _is_in_saved_model(catalog):
        yield f"{keras}SavedModel's variables"
    elif "ckpt_saved_epoch" in root:
        yield f"{keras}BackupAndRestore"
    elif "save_counter" in root:
        yield f"{keras}model in {_saver(catalog)}" if keras else _saver(catalog)
    else:
        yield f"{keras}weights" if keras else "tf.train.Checkpoint.write"
    if any(ref.slices for ref in catalog.tensors.values()):
        yield "sharded variables"
    yield "object-based"


def _saver(catalog: Catalog) -> str:
    with (
        suppress(OSError, LfsPointer),
        regular_file(catalog.prefix.parent / CHECKPOINT_STATE_FILE) as file,
    ):
        if _MANAGER_STATE in file.read(_MAX_STATE_BYTES):
            return "tf.train.CheckpointManager"
    return "tf.train.Checkpoint"


def _step(catalog: Catalog, objects: ObjectGraph) -> int | None:
    """Return the checkpoint's step: of the root's step variables, of the only optimizer, or from its name.

    Step variables that disagree do not count, nor do several optimizers. None without a step.
    CheckpointError and subclasses, as `read_step`, if a step cannot be read.
    """
    root = objects.objects[ROOT].children
    own = [objects.objects[root[name]].variable for name in _STEPS if name in root]
    names = (variable.tensor for variable in own if variable is not None)
    steps = {step for name in names if (step := read_step(catalog, name)) is not None}
    if len(steps) != 1:
        steps = set(_steps_of_optimizers(catalog, objects))
    return steps.pop() if len(steps) == 1 else catalog.step


def _steps_of_optimizers(catalog: Catalog, objects: ObjectGraph) -> Iterator[int]:
    """Yield the step of each outermost optimizer: the greatest of its own step and its inner optimizers'.

    An optimizer that scales losses does not count itself, and inner ones continue where an outer one
    restarted. CheckpointError and subclasses, as `read_step`, if a step cannot be read.
    """
    steps: dict[int, int] = {}
    for number, item in enumerate(objects.objects):
        for name in _ITERATIONS:
            variable = objects.objects[item.children[name]].variable if name in item.children else None
            step = read_step(catalog, variable.tensor) if variable is not None else None
            if step is not None and number in objects.optimizers:
                steps[number] = max(step, steps.get(number, 0))
    inside = {number: {*objects.paths_from(number)} & steps.keys() - {number} for number in steps}
    held = {inner for several in inside.values() for inner in several}
    for number in steps.keys() - held:
        yield max(steps[each] for each in (number, *inside[number]))
