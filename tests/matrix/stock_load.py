"""Load SavedModels as C++ servers do: `python stock_load.py DIRECTORY...`, a line of JSON for each.

`TF_LoadSessionFromSavedModel` of the installed TensorFlow's C library is the loader of TensorFlow Serving.
Python's is more lenient: it drops attributes with default values that the installed operations lack.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def load(library: ctypes.CDLL, directory: str) -> tuple[str, int]:
    """What the library says, empty if it loads; and how many tables are mapped then."""
    status, options, graph = library.TF_NewStatus(), library.TF_NewSessionOptions(), library.TF_NewGraph()
    tags = (ctypes.c_char_p * 1)(b"serve")
    session = library.TF_LoadSessionFromSavedModel(
        options, None, directory.encode(), tags, 1, graph, None, status
    )
    said = library.TF_Message(status).decode() if library.TF_GetCode(status) else ""
    mapped = sum(".data-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    if session:
        library.TF_DeleteSession(session, status)
    return said, mapped


def main() -> None:
    """Load each directory."""
    spec = find_spec("tensorflow")
    if spec is None or spec.origin is None:
        sys.exit("TensorFlow is not installed")
    root = Path(spec.origin).parent
    ctypes.CDLL(str(root / "libtensorflow_framework.so.2"), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(root / "libtensorflow_cc.so.2"))
    for name in ("TF_NewStatus", "TF_NewSessionOptions", "TF_NewGraph", "TF_LoadSessionFromSavedModel"):
        getattr(library, name).restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    library.TF_LoadSessionFromSavedModel.argtypes = [
        *(pointer, pointer, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)),
        *(ctypes.c_int, pointer, pointer, pointer),
    ]
    for function in (library.TF_Message, library.TF_GetCode):
        function.argtypes = [pointer]
    library.TF_DeleteSession.argtypes = [pointer, pointer]
    for directory in sys.argv[1:]:
        error, mapped = load(library, directory)
        print(json.dumps({"directory": directory, "error": error, "mapped": mapped}), flush=True)


if __name__ == "__main__":
    main()
