"""Hash a state's tables block by block, so that unchanged rows are recognised without reading old values.

    <file>: 8 bytes magic, then a numpy .npz of `keys`, `meta` and one uint64 array a table

A block is as many whole rows as fit into 4 KiB, one at least; its hash is two 32-bit multilinear hashes
side by side (D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014: the upper half of the
sum of words times random keys, modulo 2**64). The keys are drawn anew for each index, so that two different
blocks share a hash with probability 2**-64 whatever they hold. The file is a cache: it names the position
it belongs to, its own checksum guards it, and whatever is wrong with it means that it is made again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.files import read_regular
from exporter.wire.crc32c import masked_crc

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 4096

_BATCH_BYTES = 256 << 10  # hashed at a time: with its copy in wider words it fits into a core's cache

_MAGIC = b"EMHASH02"
_HALF = np.uint64(32)


def block_rows(row_bytes: int) -> int:
    """Rows of one block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


class BlockHasher(Struct, frozen=True, eq=False):
    """Hashes blocks of rows with the keys of one index: uint64 [2], expanded as far as a block needs."""

    seed: tuple[int, int]
    _keys: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockHasher) and self.seed == other.seed

    def __hash__(self) -> int:
        return hash(self.seed)

    @classmethod
    def fresh(cls) -> BlockHasher:
        """A hasher with random keys."""
        import secrets

        return cls((secrets.randbits(63), secrets.randbits(63)))

    def hash_rows(self, rows: Array) -> Array:
        """uint64 [blocks] of rows [n, ...], n > 0; the last block may be short."""
        flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
        count, width = flat.shape
        per_block = block_rows(width)
        full = count // per_block
        hashes = np.empty(-(-count // per_block), np.uint64)
        blocks = flat[: full * per_block].reshape(full, per_block * width)
        batch = max(1, _BATCH_BYTES // max(1, blocks.shape[1]))
        for start in range(0, full, batch):
            hashes[start : start + batch][: full - start] = self._hash(blocks[start : start + batch])
        if full < len(hashes):
            hashes[full:] = self._hash(flat[full * per_block :].reshape(1, -1))
        return hashes

    def _hash(self, blocks: Array) -> Array:
        width = blocks.shape[1]
        if width % 4:
            padded = np.zeros((len(blocks), width + -width % 4), np.uint8)
            padded[:, :width] = blocks
            blocks = padded
        words = blocks.view("<u4").astype(np.uint64)
        first, second = self._keys_for(words.shape[1])
        low, high = np.einsum("ij,j->i", words, first), np.einsum("ij,j->i", words, second)
        return np.asarray((low >> _HALF) | (high >> _HALF << _HALF))

    def _keys_for(self, words: int) -> tuple[Array, Array]:
        keys = self._keys.get(words)
        if keys is None:
            drawn = [np.random.Generator(np.random.Philox(key=seed)) for seed in self.seed]
            first, second = (bits.integers(0, 1 << 64, words, np.uint64) for bits in drawn)
            keys = self._keys[words] = (first, second)
        return keys


class HashIndex(Struct, frozen=True):
    """The hashes of all tables of a state; `lineage`, `position` and `state` say which.

    A delta can be removed and another be published at its position: `state` tells them apart.
    """

    lineage: str
    position: int
    hasher: BlockHasher
    tables: Mapping[str, Array]
    state: str

    def find(self, name: str, rows: int, row_bytes: int) -> Array | None:
        """The hashes of a table, None if there are none that fit it."""
        found = self.tables.get(name)
        return found if found is not None and len(found) == -(-rows // block_rows(row_bytes)) else None


def without_rows(hashes: Array, rows: Array, row_bytes: int) -> Array:
    """A table's hashes with the blocks of these rows invalidated, so that they are compared again."""
    forgotten = hashes.copy()
    blocks = np.unique(rows // block_rows(row_bytes))
    forgotten[blocks] = ~forgotten[blocks]
    return forgotten


def write_index(path: Path, index: HashIndex) -> None:
    """Write the cache; a reader sees the old or the new one."""
    buffer = io.BytesIO()
    names = sorted(index.tables)
    arrays: dict[str, Any] = {f"table_{n}": index.tables[name] for n, name in enumerate(names)}
    text = "\0".join([index.lineage, index.state, *names])
    meta = np.array([index.position, *index.hasher.seed], np.int64)
    np.savez(buffer, meta=meta, names=np.frombuffer(text.encode(), np.uint8), **arrays)
    content = buffer.getvalue()
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(_MAGIC + masked_crc(content).to_bytes(8, "little") + content)
    temporary.replace(path)


def read_index(path: Path, *, lineage: str, position: int, state: str) -> HashIndex | None:
    """The cache if it belongs to this state and is whole; None otherwise."""
    import zipfile

    try:
        content = read_regular(path)
        body = content[16:]
        if content[:8] != _MAGIC or int.from_bytes(content[8:16], "little") != masked_crc(body):
            return None
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            owner, values, *names = arrays["names"].tobytes().decode().split("\0")
            where, first, second = arrays["meta"].tolist()
            if (owner, where, values) != (lineage, position, state):
                return None
            tables = {name: arrays[f"table_{n}"] for n, name in enumerate(names)}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return HashIndex(lineage, position, BlockHasher((first, second)), tables, state)
