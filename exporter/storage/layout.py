"""Every name on disk, in one place: in SavedModels, published models and trainers' directories.

<model>/<version>/saved_model.pb  variables/variables.*  variables/mapped.id  assets/  assets.extra/
<model>/<version>/manifest.json
<model>/deltas/<log>/<from>-<to>/delta.*  manifest.json
<model>/deltas/<log>/hold  hold.json             a position that readers do not pass by themselves; who set it
<model>/deltas/<log>/.state/                     caches of the exporter
<model>/tags.json                                names of positions, see `exporter.publish.tags`
<model>/.jobs/<plan>/  receipts/                 work of an engine that the next run continues
<model>/.lock  .turn  .watch  .canary  .staging-*  .trash-*   work in progress; servers read numbers only
<model>/.made-by.json                            the arguments of the last export, for people
<model>/.pushed                                  heads of the stores that hold a copy of the model
<model>/.identity                                of a copy: the only model that it accepts with `--trust`
<model>/.fetched                                 of a copy: why it fetched its newest base
<model>/.taken                                   paths never to be used again: see `exporter.transfer.head`
<ckpt-dir>/checkpoint                            names the newest checkpoint
<ckpt-dir>/increments/<from>-<to>/delta.*  manifest.json
<ckpt-dir>/increments/<checkpoint>.json  .session
<ckpt-dir>/.incremental_checkpoint/              DeepRec's increments
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

SAVED_MODEL_FILE = "saved_model.pb"
SAVED_MODEL_TEXT_FILE = "saved_model.pbtxt"
SAVED_MODEL_FILES = (SAVED_MODEL_FILE, SAVED_MODEL_TEXT_FILE)
# In a directory that Orbax wrote: they mark a step, a tree of arrays, a store of arrays.
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
# A model of more than 2 GiB, in several protos; TensorFlow reads it, this program refuses it by name.
SAVED_MODEL_PARTS_FILE = "saved_model.cpb"

VARIABLES_DIRECTORY = "variables"
VARIABLES_NAME = "variables"
VARIABLES_PREFIX = Path(VARIABLES_DIRECTORY, VARIABLES_NAME)
# Beside tables that servers map: the id by which the graph recognizes them.
MAPPED_ID_FILE = Path(VARIABLES_DIRECTORY, "mapped.id")

ASSETS_DIRECTORY = "assets"
EXTRA_DIRECTORY = "assets.extra"
WARMUP_FILE = Path(EXTRA_DIRECTORY, "tf_serving_warmup_requests")
UPDATABLE_NAME = "incremental.json"
# An asset of a base that takes deltas: describes it for people, and gives the graph its own path.
UPDATABLE_FILE = Path(ASSETS_DIRECTORY, UPDATABLE_NAME)

PAIR_NAME = "export"  # Cloud ML's pair: `export.meta`, and a tensor bundle of this name

MANIFEST_FILE = "manifest.json"
DELTAS_DIRECTORY = "deltas"
DELTA_NAME = "delta"
HOLD_FILE = "hold"
HOLD_DOCUMENT_FILE = "hold.json"
TAGS_FILE = "tags.json"
CACHES_DIRECTORY = Path(".state")
HASHES_DIRECTORY = CACHES_DIRECTORY / "hashes"
CHECKED_DIRECTORY = CACHES_DIRECTORY / "checked"
SOURCES_FILE = CACHES_DIRECTORY / "sources.json"
NORMS_FILE = CACHES_DIRECTORY / "norms.json"
RESIDUAL_PREFIX = "left-out-"
OVERLAID_PREFIX = "overlaid-"
LOCK_FILE = ".lock"
TURN_FILE = ".turn"  # locked by whoever gets `.lock` next
WATCH_LOCK_FILE = ".watch"
CANARY_LOCK_FILE = ".canary"
MADE_BY_FILE = ".made-by.json"
PUSHED_FILE = ".pushed"  # the head of each store to which a model was pushed, or from which it was pulled

# Paths in a store at which another machine abandoned a publication; they are never used again.
TAKEN_FILE = ".taken"

HEAD_FILE = "head.json"  # in a store: the next publication, or the last one

JOBS_DIRECTORY = ".jobs"
RECEIPTS_DIRECTORY = "receipts"
INPUTS_DIRECTORY = "inputs"  # in a job: copies of files that the command itself made for its tasks

STAGING_PREFIX = ".staging-"
TRASH_PREFIX = ".trash-"
PULL_PREFIX = ".pull-"
PULL_LOCK_FILE = ".pull"
PULL_JOBS_SUFFIX = ".jobs"  # beside a publication that is being pulled: the tasks that merge it here
FETCHED_FILE = ".fetched"
IDENTITY_FILE = ".identity"  # of the only model whose publications a copy accepts, where keys are trusted

CHECKPOINT_STATE_FILE = "checkpoint"
# The part of a checkpoint file's name after the prefix.
# Five digits at least: TensorFlow writes shard numbers with %05d, and longer ones whole.
CHECKPOINT_SUFFIX = re.compile(r"\.(index|meta|data-[0-9]{5,}-of-[0-9]{5,})$")

INCREMENTS_DIRECTORY = "increments"
SESSION_FILE = ".session"
UNFINISHED_MARKER_PREFIX = ".milestone-"
DEEPREC_INCREMENTS_DIRECTORY = ".incremental_checkpoint"


def is_saved_model(path: Path) -> bool:
    """True for a directory that holds a SavedModel in any of its forms, also one that is not read here.

    False for a directory that this user may not search.
    """
    with suppress(PermissionError):  # pathlib's is_file passes it
        return any((path / name).is_file() for name in (*SAVED_MODEL_FILES, SAVED_MODEL_PARTS_FILE))
    return False


# The most bytes of a name and of a path on Linux: NAME_MAX, and PATH_MAX without the NUL.
LONGEST_NAME, LONGEST_PATH = 255, 4095
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def flaw_of(name: str) -> str:
    """Return the reason why a name from a document is not a file's path below a directory; "" if it is."""
    parts = name.split("/")
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        return "it is not text"
    if name.startswith(("/", "~")):  # shells take `~` for a home
        return "it is absolute"
    if not {"", ".", ".."}.isdisjoint(parts):
        return f"a part of it is {next(part for part in parts if part in ('', '.', '..'))!r}"
    if _CONTROL.search(name):
        return "it has a control character"
    if max(sizes) > LONGEST_NAME or sum(sizes) + len(parts) - 1 > LONGEST_PATH:
        return f"it is longer than {LONGEST_NAME} bytes, or than {LONGEST_PATH} with its directories"
    return ""
