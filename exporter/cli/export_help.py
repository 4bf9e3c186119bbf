"""The help of `export-model`: its text, and the groups of its options."""

from __future__ import annotations

from exporter.terminal.edge import EXIT_CODES

SERVED = "What to serve"
PLACES = "Where from, where to"
NAMES = "Which tensor is which"
STORAGE = "Storage"
CHECKS = "Checks"
DELTAS = "Deltas"
FOLLOWING = "Following training"
KEYED = "Tables by keys"
WORK = "Work on many bytes"

HELP = f"""Export a distributed TensorFlow checkpoint as a SavedModel that TensorFlow Serving can serve.

The inference graph comes from --model: a builder (pkg.mod:fn or file.py:fn), a .meta file, or a SavedModel
directory; without it, from the .meta beside the checkpoint. Data is linked, not copied, where the file system
allows it.

\b
Examples:
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker
  export-model --ckpt-dir train/model.ckpt-900 --input x=Placeholder:0 --output y=Softmax:0 --out models/cnn
  export-model --ckpt-dir train/ --model models/cnn/900 --average ema --verify outputs --out models/cnn
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --dry-run
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --watch --stop-idle 2h
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --incr
  export-model inspect train/

{EXIT_CODES}"""
