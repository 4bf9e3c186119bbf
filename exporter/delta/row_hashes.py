"""Hash a state's tables block by block, so that unchanged rows are recognised without reading old values.

    <file>: 8 bytes magic, 8 bytes checksum, then a numpy .npz of `names`, `meta` and one uint64 array a table

A block is as many whole rows as fit into 4 KiB, one at least; its hash is XXH3 in 64 bits with a seed that is
drawn for each index, so that no data of a trainer's collides for certain: two different blocks do with a
probability of about 2**-64. The file is a cache: it names the position it belongs to, its own checksum guards
it, and if anything is wrong with it, or it is of an earlier release, it is made again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.storage.files import read_record, replace_file
from exporter.tables.integer_sets import distinct
from exporter.wire.crc32c import masked_crc
from exporter.wire.dtypes import Array

BLOCK_BYTES = 4096

_MAGIC = b"EMHASH03"  # the number grows with each change of hash or layout
_LEAST_BLOCK_BYTES = BLOCK_BYTES // 2  # as many whole rows as fit always fill more than half of a block
_BESIDE_BYTES = 4096
"""An upper bound of the bytes that a table, or the index itself, takes besides its hashes and its name."""


def block_rows(row_bytes: int) -> int:
    """Return the number of rows of `row_bytes` bytes in one block, at least 1."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


class BlockHasher(Struct, frozen=True):
    """Hashes blocks of rows with the seed of one index."""

    seed: int

    @classmethod
    def fresh(cls) -> BlockHasher:
        """Return a hasher with a random seed."""
        import secrets

        return cls(secrets.randbits(63))  # it is stored as int64

    @classmethod
    def of(cls, name: str) -> BlockHasher:
        """Return the hasher whose seed is derived from `name`, for processes that need the same one."""
        # 63 bits, as the index stores the seed as int64.
        return cls(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1)

    def hash_rows(self, rows: Array) -> Array:
        """Return the hash of each block, uint64 [blocks], of rows [n, ...], n > 0.

        The last block may have fewer rows.
        """
        # 9 GB/s on one core; the hash used before reached 3.3 GB/s.
        from xxhash import xxh3_64_intdigest as hash_of

        flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
        count, width = flat.shape
        per_block = block_rows(width)
        blocks, size = -(-count // per_block), per_block * width
        data, seed = flat.reshape(-1).data, self.seed
        hashes = (hash_of(data[number * size : (number + 1) * size], seed) for number in range(blocks))
        return np.fromiter(hashes, np.uint64, blocks)


class HashIndex(Struct, frozen=True):
    """The hashes of all tables of a state, which `lineage`, `position` and `state` identify.

    A delta can be removed and another be published at its position: `state` distinguishes them.
    """

    lineage: str
    position: int
    hasher: BlockHasher
    tables: Mapping[str, Array]
    state: str

    def find(self, name: str, rows: int, row_bytes: int) -> Array | None:
        """Return the hash of each block, uint64, of the table `name`.

        None if the index lacks the table or has another number of blocks for it. `rows` and `row_bytes` are
        the table's number of rows and the bytes of a row.
        """
        found = self.tables.get(name)
        return found if found is not None and len(found) == -(-rows // block_rows(row_bytes)) else None


def without_rows(hashes: Array, rows: Array, row_bytes: int) -> Array:
    """Return a copy of a table's hashes in which the blocks of these rows are invalid.

    So these blocks are compared again. `rows` are row numbers in any order, `row_bytes` the bytes of a row.
    """
    forgotten = hashes.copy()
    blocks = distinct(rows // block_rows(row_bytes))
    forgotten[blocks] = ~forgotten[blocks]  # never equal to the hash itself
    return forgotten


def write_index(path: Path, index: HashIndex) -> None:
    """Write the index to `path` by a rename: a reader sees the old or the new one.

    Raises OSError if it cannot be written. The directory is made if its parent exists.
    """
    buffer = io.BytesIO()
    names = sorted(index.tables)
    arrays: dict[str, Any] = {f"table_{n}": index.tables[name] for n, name in enumerate(names)}
    text = "\0".join([index.lineage, index.state, *names])
    meta = np.array([index.position, index.hasher.seed], np.int64)
    np.savez(buffer, meta=meta, names=np.frombuffer(text.encode(), np.uint8), **arrays)
    content = buffer.getvalue()
    path.parent.mkdir(exist_ok=True)
    replace_file(path, _MAGIC + masked_crc(content).to_bytes(8, "little") + content)


def most_bytes(tables: Mapping[str, int]) -> int:
    """Return an upper bound for the file size, in bytes, of an index of tables.

    `tables` are the tables' sizes in bytes, by name.
    """
    hashes = sum(8 * (bytes_ // _LEAST_BLOCK_BYTES) + _BESIDE_BYTES for bytes_ in tables.values())
    return hashes + 4 * sum(map(len, tables)) + _BESIDE_BYTES


def read_index(
    path: Path, *, lineage: str, position: int, state: str, limit: int = 1 << 34
) -> HashIndex | None:
    """Read the index at `path`.

    None if it is of another state (`lineage`, `position`, `state`) or an earlier release, damaged,
    compressed, absent, unreadable, or larger than `limit` bytes; no exception is raised.
    """
    import zipfile

    try:
        content = read_record(path, limit)
        body = content[16:]
        if content[:8] != _MAGIC or int.from_bytes(content[8:16], "little") != masked_crc(body):
            return None
        # A deflated member of a hostile file could be any size in memory.
        with zipfile.ZipFile(io.BytesIO(body)) as members:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                return None
        # a pickle in a hostile file would run code
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            owner, values, *names = arrays["names"].tobytes().decode().split("\0")
            where, seed = arrays["meta"].tolist()
            if (owner, where, values) != (lineage, position, state):
                return None
            tables = {name: arrays[f"table_{n}"] for n, name in enumerate(names)}
    except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile):
        return None
    return HashIndex(lineage, position, BlockHasher(seed), tables, state)
