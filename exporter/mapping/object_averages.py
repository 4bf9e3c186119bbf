"""Find moving averages in an object-based checkpoint: which tensor averages which.

A Keras optimizer with `use_ema=True` has a list `_model_variables_moving_average`: in Keras 3 in the order of
its `_trainable_variables`, in Keras 2 each called `<optimizer>/average/<variable>`, or `average/<variable>`
if the loss is scaled. TensorFlow's own averages are called as their variables, the slot's name behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from exporter.mapping.extras import TF_AVERAGE
from exporter.mapping.object_matching import TrainedObjects

_AVERAGES = "_model_variables_moving_average"
_VARIABLES = "_trainable_variables"
_KERAS_2_NAME = re.compile(r"([^/]+/)?average/(?P<variable>.+)")


def averages(trained: TrainedObjects, slot: str) -> dict[str, str]:
    """The average's tensor by the variable's; `slot` is the averages' slot name, "ema" for the usual ones."""
    found = dict(_by_slot(trained, TF_AVERAGE if slot == "ema" else slot))
    if slot == "ema":
        found |= dict(_of_keras(trained))
    return found


def _by_slot(trained: TrainedObjects, slot: str) -> Iterator[tuple[str, str]]:
    for name, variables in trained.by_name.items():
        shadows = trained.by_name.get(f"{name}/{slot}", ())
        if len(variables) == len(shadows) == 1:
            yield variables[0].tensor, shadows[0].tensor


def _of_keras(trained: TrainedObjects) -> Iterator[tuple[str, str]]:
    objects = trained.objects
    for optimizer in objects.optimizers:
        shadows = _listed(trained, optimizer, _AVERAGES)
        variables = _listed(trained, optimizer, _VARIABLES)
        if len(shadows) == len(variables):
            yield from zip(variables, shadows, strict=True)
            continue
        names = {variable.tensor: name for name, same in trained.by_name.items() for variable in same}
        for shadow in shadows:
            found = _KERAS_2_NAME.fullmatch(names.get(shadow, ""))
            same = trained.by_name.get(found["variable"], ()) if found else ()
            if len(same) == 1:
                yield same[0].tensor, shadow


def _listed(trained: TrainedObjects, optimizer: int, edge: str) -> list[str]:
    """The tensors of a list that an optimizer keeps, in its order."""
    number = trained.objects.at(edge, optimizer)
    children = {} if number is None else trained.objects.objects[number].children
    in_order = sorted(children.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1)
    variables = (trained.objects.objects[child].variable for _, child in in_order)
    return [variable.tensor for variable in variables if variable is not None]
