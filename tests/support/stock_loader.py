"""A SavedModel in the C++ loader of any TensorFlow, asked over pipes: `python stock_loader.py`.

`TF_LoadSessionFromSavedModel` and `TF_SessionRun` of the wheel's C library are what TensorFlow Serving loads
and answers with; TensorFlow's Python is not imported. Standard library, numpy, and syntax of Python 3.6.

A line of JSON each way. `{"load": DIRECTORY}` answers `{"error": TEXT, "mapped": N}`.
`{"run": {TENSOR: [DTYPE, VALUES]}, "fetch": [TENSOR, ...], "times": N}`, in N threads at once, answers
`{"answers": [VALUES or TEXT, ...]}`; `{"registry": true}` an OpList and a KernelList in Base64.
"""

import base64
import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

DTYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 6: "int8", 9: "int64", 10: "bool"}
STRING = 7
NUMBERS = {name: number for number, name in DTYPES.items()}
POINTER = ctypes.c_void_p


class Output(ctypes.Structure):
    """`TF_Output`."""

    _fields_ = [("oper", POINTER), ("index", ctypes.c_int)]


class Buffer(ctypes.Structure):
    """`TF_Buffer`."""

    _fields_ = [("data", POINTER), ("length", ctypes.c_size_t), ("deallocator", POINTER)]


def _library():
    root = Path(find_spec("tensorflow").origin).parent
    if not (root / "python").is_dir():  # 1.15's package lies in another one
        root = Path(find_spec("tensorflow_core").submodule_search_locations[0])
    for name in sorted(root.glob("libtensorflow_framework.so.?")):
        ctypes.CDLL(str(name), ctypes.RTLD_GLOBAL)
    wanted = ("libtensorflow_cc.so.2", "python/_pywrap_tensorflow_internal.so")
    library = ctypes.CDLL(str(next(root / name for name in wanted if (root / name).exists())))
    for name in ("TF_NewStatus", "TF_NewSessionOptions", "TF_NewGraph", "TF_LoadSessionFromSavedModel"):
        getattr(library, name).restype = POINTER
    for name in ("TF_GraphOperationByName", "TF_AllocateTensor", "TF_TensorData"):
        getattr(library, name).restype = POINTER
    library.TF_Message.restype = library.TF_Version.restype = ctypes.c_char_p
    for name in ("TF_GetAllOpList", "TF_GetAllRegisteredKernels"):
        getattr(library, name).restype = ctypes.POINTER(Buffer)
    library.TF_GetAllRegisteredKernels.argtypes = [POINTER]
    library.TF_Dim.restype = ctypes.c_int64
    library.TF_TensorByteSize.restype = ctypes.c_size_t
    pointers = ("TF_Message", "TF_GetCode", "TF_TensorData", "TF_TensorByteSize", "TF_TensorType")
    for name in (*pointers, "TF_NumDims", "TF_DeleteTensor", "TF_DeleteStatus"):
        getattr(library, name).argtypes = [POINTER]
    library.TF_Dim.argtypes = [POINTER, ctypes.c_int]
    library.TF_GraphOperationByName.argtypes = [POINTER, ctypes.c_char_p]
    library.TF_AllocateTensor.argtypes = [ctypes.c_int, POINTER, ctypes.c_int, ctypes.c_size_t]
    library.TF_DeleteSession.argtypes = [POINTER, POINTER]
    strings = ctypes.POINTER(ctypes.c_char_p)
    library.TF_LoadSessionFromSavedModel.argtypes = [
        *(POINTER, POINTER, ctypes.c_char_p, strings, ctypes.c_int, POINTER, POINTER, POINTER)
    ]
    library.TF_SessionRun.argtypes = [
        *(POINTER, POINTER, POINTER, POINTER, ctypes.c_int, POINTER, POINTER, ctypes.c_int),
        *(POINTER, ctypes.c_int, POINTER, POINTER),
    ]
    return library


class Loader:
    """The library, and the model that it holds."""

    def __init__(self):
        self.library, self.session, self.graph = _library(), None, None
        self.is_old = self.library.TF_Version().startswith(b"1.")

    def registry(self):
        """The operations and kernels that are registered."""
        library = self.library
        found = {"ops": library.TF_GetAllOpList()}
        found["kernels"] = library.TF_GetAllRegisteredKernels(library.TF_NewStatus())
        texts = {
            name: ctypes.string_at(each.contents.data, each.contents.length) for name, each in found.items()
        }
        return {name: base64.b64encode(text).decode() for name, text in texts.items()}

    def load(self, directory):
        """What the library says, empty if it loads; and how many tables are mapped then."""
        library, status = self.library, self.library.TF_NewStatus()
        if self.session:
            library.TF_DeleteSession(self.session, status)
        self.graph = library.TF_NewGraph()
        tags = (ctypes.c_char_p * 1)(b"serve")
        options = library.TF_NewSessionOptions()
        self.session = library.TF_LoadSessionFromSavedModel(
            options, None, directory.encode(), tags, 1, self.graph, None, status
        )
        mapped = sum(".data-" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return {"error": self._said(status), "mapped": mapped}

    def run(self, feeds, fetches):
        """Values of the tensors; the message if the call fails."""
        library, status = self.library, self.library.TF_NewStatus()
        given = [self._tensor(np.array(values, dtype)) for dtype, values in feeds.values()]
        found = (POINTER * len(fetches))()
        library.TF_SessionRun(
            *(self.session, None, self._outputs(feeds), (POINTER * len(given))(*given), len(given)),
            *(self._outputs(fetches), found, len(fetches), None, 0, None, status),
        )
        said = self._said(status)
        for tensor in given:
            library.TF_DeleteTensor(tensor)
        return said or [self._values(tensor) for tensor in found]

    def _outputs(self, names):
        found = (Output * len(names))()
        for each, name in zip(found, names):  # noqa: B905 - Python 3.6
            node, _, index = name.partition(":")
            each.oper = self.library.TF_GraphOperationByName(self.graph, node.encode())
            each.index = int(index or 0)
        return found

    def _tensor(self, array):
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        number = NUMBERS[array.dtype.name]
        tensor = self.library.TF_AllocateTensor(number, dims, array.ndim, array.nbytes)
        ctypes.memmove(self.library.TF_TensorData(tensor), array.tobytes(), array.nbytes)
        return tensor

    def _values(self, tensor):
        library = self.library
        shape = [library.TF_Dim(tensor, n) for n in range(library.TF_NumDims(tensor))]
        size = library.TF_TensorByteSize(tensor)
        data = ctypes.string_at(library.TF_TensorData(tensor), size) if size else b""
        kind = library.TF_TensorType(tensor)
        if kind == STRING:
            texts = [self._text(data, number, int(np.prod(shape))) for number in range(int(np.prod(shape)))]
            values = np.array(texts, object).reshape(shape).tolist()
        else:
            values = np.frombuffer(data, DTYPES[kind]).reshape(shape).tolist()
        library.TF_DeleteTensor(tensor)
        return values

    def _text(self, data, number, count):
        """One of a tensor's strings; their form was another one before 2.4 (`TF_TString`)."""
        words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
        if self.is_old:
            at, size, shift = 8 * count + int(words[number]), 0, 0
            while True:
                byte = data[at]
                size |= (byte & 127) << shift
                at, shift = at + 1, shift + 7
                if byte < 128:
                    return data[at : at + size].decode()
        own = data[24 * number : 24 * number + 24]
        if own[0] & 3 == 0:
            return own[1 : 1 + (own[0] >> 2)].decode()
        size, _, large = words[3 * number : 3 * number + 3].tolist()
        at = large if own[0] & 3 == 1 else int(words[3 * number + 1])
        return ctypes.string_at(at, size >> 2).decode()

    def _said(self, status):
        said = self.library.TF_Message(status).decode() if self.library.TF_GetCode(status) else ""
        self.library.TF_DeleteStatus(status)
        return said


def main():
    """Answer each line."""
    loader = Loader()
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            answer = loader.load(asked["load"])
        elif "registry" in asked:
            answer = loader.registry()
        else:
            with ThreadPoolExecutor(asked["times"]) as pool:
                calls = [pool.submit(loader.run, asked["run"], asked["fetch"]) for _ in range(asked["times"])]
                answer = {"answers": [call.result() for call in calls]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
