"""Write Cloud ML's pair: `export.meta`, with collections that name inputs and outputs, and the bundle
`export.*`.

The collections `inputs` and `outputs` hold one JSON object each, name -> tensor: what Cloud ML's online
prediction of TensorFlow 0.12 and trainers after it read (`tf.train.import_meta_graph`, `Saver.restore`).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from exporter.bundle.saved_model_writer import restorable_graph
from exporter.errors import NotServable, os_error
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.signatures import DEFAULT_SIGNATURE
from exporter.layout import PAIR_NAME, SAVED_MODEL_FILE, VARIABLES_DIRECTORY, VARIABLES_NAME
from exporter.mapping.build import VariableMapping
from exporter.wire.protos import Proto

_INIT_COLLECTION = "serving_init_op"  # tensorflow/contrib/session_bundle/constants.py


def write_pair(graph: InferenceGraph, mapping: VariableMapping, directory: Path) -> None:
    """Write the pair into `directory` beside `variables/`, whose shards it shares by links.

    Raises:
        NotServable: the graph has no default signature, or one of sparse tensors, or reads files.
        PublishError: the directory cannot be written.
    """
    meta_graph = restorable_graph(graph, mapping)
    if graph.assets:
        files = ", ".join(asset.file_name for asset in graph.assets)
        raise NotServable(
            f"the graph reads {files}, for which export.meta has no place", hint="use --format saved_model"
        )
    _add_collections(meta_graph)
    if graph.init_op:
        meta_graph.collection_def[_INIT_COLLECTION].node_list.value.append(graph.init_op)
    target = directory / f"{PAIR_NAME}.meta"
    try:
        target.write_bytes(meta_graph.SerializeToString(deterministic=True))
        for file in sorted((directory / VARIABLES_DIRECTORY).glob(f"{VARIABLES_NAME}.*")):
            os.link(file, directory / f"{PAIR_NAME}{file.name.removeprefix(VARIABLES_NAME)}")
    except OSError as exc:
        raise os_error(exc, target) from exc


def keep_pair_alone(directory: Path) -> None:
    """Remove the SavedModel beside a pair.

    Raises:
        PublishError: it cannot be removed.
    """
    try:
        (directory / SAVED_MODEL_FILE).unlink()
        shutil.rmtree(directory / VARIABLES_DIRECTORY, ignore_errors=False)
    except FileNotFoundError:
        return  # a model without variables
    except OSError as exc:
        raise os_error(exc, directory) from exc


def _add_collections(meta_graph: Proto) -> None:
    if DEFAULT_SIGNATURE not in meta_graph.signature_def:
        raise NotServable(
            f"export.meta describes the signature {DEFAULT_SIGNATURE!r} alone, which the graph does not have",
            cause=f"it has {', '.join(sorted(meta_graph.signature_def))}",
        )
    signature = meta_graph.signature_def[DEFAULT_SIGNATURE]
    for name, infos in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        tensors = {}
        for alias, info in infos.items():
            if info.WhichOneof("encoding") != "name":
                raise NotServable(f"export.meta names dense tensors, and {alias!r} is not one")
            tensors[alias] = info.name
        text = json.dumps(tensors, sort_keys=True)
        meta_graph.collection_def[name].bytes_list.value[:] = [text.encode()]
