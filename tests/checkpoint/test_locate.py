import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint import candidates, families, locate, open_checkpoint
from exporter.checkpoint.tensor_bundle import index_path, read_catalog, shard_path
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsupportedFormat,
)
from tests.support.bundles import write
from tests.support.users import as_user, needs_root


def state(directory: Path, name: str, *others: str) -> None:
    lines = [
        f'model_checkpoint_path: "{name}"',
        *(f'all_model_checkpoint_paths: "{other}"' for other in others),
    ]
    (directory / "checkpoint").write_text("\n".join(lines) + "\n")


def remove(prefix: Path) -> None:
    index_path(prefix).unlink()
    shard_path(prefix, 0, 1).unlink()


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(prefixes: list[Path]) -> list[str]:
    return [prefix.name for prefix in prefixes]


def test_the_state_file_goes_first_also_if_a_newer_one_lies_beside(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        write(tmp_path / f"model.ckpt-{step}")
    state(tmp_path, "model.ckpt-20", "model.ckpt-5", "model.ckpt-20")
    catalog = open_checkpoint(tmp_path)
    assert catalog.prefix == tmp_path / "model.ckpt-20"
    assert catalog.step == 20
    assert catalog.notes == ()
    assert names(candidates(tmp_path)) == ["model.ckpt-20", "model.ckpt-100", "model.ckpt-5"]


@pytest.mark.parametrize("relative", [True, False])
def test_tensorflows_own_state_file_is_read(tmp_path: Path, relative: bool) -> None:
    import tensorflow as tf
    from tensorflow.python.checkpoint.checkpoint_management import update_checkpoint_state_internal

    folder = tmp_path / 'größe "x"'
    first, _ = (write(folder / f"m'{step}'-{step}") for step in (1, 2))
    update_checkpoint_state_internal(str(folder), str(first), [str(first)], save_relative_paths=relative)
    assert tf.train.latest_checkpoint(str(folder)) == str(first)
    assert open_checkpoint(folder).prefix == first


def test_a_directory_that_was_moved_is_read_where_it_is_now(tmp_path: Path) -> None:
    write(tmp_path / "old" / "model.ckpt-3")
    state(tmp_path / "old", str(tmp_path / "old" / "model.ckpt-3"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert open_checkpoint(tmp_path / "new").prefix == tmp_path / "new" / "model.ckpt-3"


def test_a_copy_goes_before_the_original_and_the_original_before_nothing(tmp_path: Path) -> None:
    write(tmp_path / "original" / "model.ckpt-3")
    write(tmp_path / "copy" / "model.ckpt-3")
    state(tmp_path / "copy", str(tmp_path / "original" / "model.ckpt-3"))
    assert open_checkpoint(tmp_path / "copy").prefix.parent.name == "copy"
    remove(tmp_path / "copy" / "model.ckpt-3")
    assert open_checkpoint(tmp_path / "copy").prefix.parent.name == "original"


@pytest.mark.parametrize("name", ["sub/model.ckpt-3", "./sub/model.ckpt-3", "elsewhere/model.ckpt-1"])
def test_relative_paths_in_a_state_file(tmp_path: Path, name: str) -> None:
    write(tmp_path / "sub" / "model.ckpt-3")
    write(tmp_path / "model.ckpt-1")
    state(tmp_path, name)
    assert open_checkpoint(tmp_path).prefix.name == Path(name).name


def test_the_state_file_itself_means_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "model.ckpt-3")
    state(tmp_path, "model.ckpt-3")
    assert open_checkpoint(tmp_path / "checkpoint").step == 3


def test_a_prefix_may_be_called_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    state(tmp_path, "checkpoint")
    assert open_checkpoint(tmp_path).prefix == tmp_path / "checkpoint"
    assert open_checkpoint(tmp_path / "checkpoint").prefix == tmp_path / "checkpoint"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe garbage",
        b'model_checkpoint_path: "unfinished',
        b'model_checkpoint_path: ""',
        b'model_checkpoint_path: "/"',
        b'model_checkpoint_path: "a\\000b"',
        b'model_checkpoint_path: "\\xff\\"',
        b'model_checkpoint_path: "' + b"x" * 5000 + b'"',
        b'all_model_checkpoint_paths: "model.ckpt-1"',
        b"model_checkpoint_path: " * 100_000,
    ],
)
def test_without_a_usable_state_file_the_highest_step_is_taken(tmp_path: Path, content: bytes) -> None:
    for step in (999, 1000, 7):
        write(tmp_path / f"model.ckpt-{step}")
    os.utime(index_path(tmp_path / "model.ckpt-7"), (4e9, 4e9))
    (tmp_path / "checkpoint").write_bytes(content)
    assert open_checkpoint(tmp_path).step == 1000
    (tmp_path / "checkpoint").unlink()
    assert names(candidates(tmp_path)) == ["model.ckpt-1000", "model.ckpt-999", "model.ckpt-7"]


def test_names_without_a_step_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for name in ("cp-9.ckpt", "cp-10.ckpt", "final", "cp-0003.ckpt"):
        write(tmp_path / name)
    assert names(candidates(tmp_path)) == ["final", "cp-10.ckpt", "cp-9.ckpt", "cp-0003.ckpt"]
    write(tmp_path / "model-0")
    assert candidates(tmp_path)[0].name == "model-0"


@pytest.mark.parametrize("suffix", ["", ".index", ".meta", ".data-00000-of-00001"])
@pytest.mark.parametrize(
    "name", ["model.ckpt-100", "cp-0003.ckpt", "v1.2.index", "weights.data-00000-of-00002"]
)
def test_a_prefix_may_be_named_by_any_of_its_files(tmp_path: Path, name: str, suffix: str) -> None:
    write(tmp_path / name)
    write(tmp_path / "model.ckpt-200")
    state(tmp_path, "model.ckpt-200")
    assert open_checkpoint(tmp_path / f"{name}{suffix}").prefix == tmp_path / name


def test_left_overs_are_not_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "model.ckpt-1")
    write(tmp_path / "model.ckpt-9_temp_0f3a" / "part-00000-of-00002")
    (tmp_path / "model.ckpt-9.meta").touch()
    (tmp_path / "model.ckpt-8.index.tempstate123").touch()
    assert open_checkpoint(tmp_path).step == 1
    assert names(candidates(tmp_path)) == ["model.ckpt-1"]


def test_relative_paths_and_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.ckpt-1")
    monkeypatch.chdir(tmp_path)
    for path in (Path(), Path("model.ckpt-1"), Path("./model.ckpt-1.index")):
        assert open_checkpoint(path).step == 1


def test_a_missing_shard_sends_a_directory_to_the_next_newest_and_a_prefix_nowhere(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"model.ckpt-{step}")
    state(tmp_path, "model.ckpt-3")
    shard_path(tmp_path / "model.ckpt-3", 0, 1).unlink()
    catalog = open_checkpoint(tmp_path)
    assert catalog.step == 2
    (note,) = catalog.notes
    assert note.startswith(f"passed over {tmp_path / 'model.ckpt-3'}: there is no ")
    with pytest.raises(MissingShard):
        open_checkpoint(tmp_path / "model.ckpt-3")


def test_a_state_file_that_names_a_missing_prefix(tmp_path: Path) -> None:
    write(tmp_path / "model.ckpt-1")
    state(tmp_path, "model.ckpt-3")
    catalog = open_checkpoint(tmp_path)
    assert catalog.step == 1
    assert "model.ckpt-3.index" in catalog.notes[0]
    remove(tmp_path / "model.ckpt-1")
    with pytest.raises(CheckpointNotFound, match=str(tmp_path)) as caught:
        open_checkpoint(tmp_path)
    assert "state file names model.ckpt-3, which is not there" in caught.value.cause


def test_if_all_are_incomplete_each_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        shard_path(write(tmp_path / f"model.ckpt-{step}"), 0, 1).unlink()
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.cause.index("ckpt-2.data") < caught.value.cause.index("ckpt-1.data")
    remove_index = index_path(tmp_path / "model.ckpt-2")
    remove_index.unlink()
    with pytest.raises(MissingShard, match=r"ckpt-1\.data"):
        open_checkpoint(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("file", "harm", "error"),
    [
        (lambda prefix: index_path(prefix), damage, CorruptFile),
        (lambda prefix: index_path(prefix), cut, TruncatedFile),
        (lambda prefix: shard_path(prefix, 0, 1), cut, TruncatedFile),
    ],
    ids=["flipped bit", "index cut", "shard cut"],
)
def test_damage_that_stays_is_never_a_reason_to_take_an_older_one(
    tmp_path: Path, file: Callable[[Path], Path], harm: Callable[[Path], None], error: type[CheckpointError]
) -> None:
    for step in (1, 2):
        write(tmp_path / f"model.ckpt-{step}")
    path = file(tmp_path / "model.ckpt-2")
    harm(path)
    for source in (tmp_path, tmp_path / "model.ckpt-2"):
        with pytest.raises(error, match=path.name) as caught:
            open_checkpoint(source)
        assert caught.value.hint.endswith(f"name the one before it: --ckpt-dir {tmp_path / 'model.ckpt-1'}")


def test_a_file_that_is_being_written_is_waited_for_or_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sleep` is where the writer goes on: a real one would make the test a matter of luck."""
    old, new = (write(tmp_path / f"model.ckpt-{step}", w=np.arange(9.0)) for step in (1, 2))
    shard = shard_path(new, 0, 1)
    whole = shard.read_bytes()

    def writes(content: bytes) -> Callable[[float], object]:
        return lambda _: shard.write_bytes(content)

    shard.write_bytes(whole[:10])
    monkeypatch.setattr(time, "sleep", writes(whole))
    assert open_checkpoint(tmp_path).prefix == new
    shard.write_bytes(whole[:10])
    monkeypatch.setattr(time, "sleep", writes(whole[:20]))
    catalog = open_checkpoint(tmp_path)
    assert catalog.prefix == old
    assert catalog.notes == (f"passed over {new}: {new} is being written or removed",)
    shard.write_bytes(whole[:10])
    with pytest.raises(CheckpointChanged, match="being written") as caught:
        open_checkpoint(new)
    assert shard.name in caught.value.cause


def test_a_trainer_that_prunes_everything_while_we_look_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model.ckpt-1")
    read, steps = read_catalog, iter(range(2, 5))

    def prune_then_read(prefix: Path) -> object:
        if index_path(prefix).exists() and (step := next(steps, None)):
            remove(prefix)
            write(tmp_path / f"model.ckpt-{step}")
        return read(prefix)

    monkeypatch.setattr(locate, "read_family", prune_then_read)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(CheckpointNotFound) as caught:
        open_checkpoint(tmp_path)
    assert "ckpt-3" in caught.value.cause
    catalog = open_checkpoint(tmp_path)
    assert catalog.step == 4


def test_reading_beside_a_trainer_that_writes_and_prunes(tmp_path: Path) -> None:
    """Whatever is opened is whole: its values are those of its step."""
    done = threading.Event()

    def train() -> None:
        for step in range(1, 200):
            write(tmp_path / f"model.ckpt-{step}", w=np.full(1000, step), global_step=np.int64(step))
            state(tmp_path, f"model.ckpt-{step}")
            if step >= 5:
                remove(tmp_path / f"model.ckpt-{step - 5}")
            time.sleep(0.002)  # lets the reader run
        done.set()

    write(tmp_path / "model.ckpt-0", w=np.full(1000, 0), global_step=np.int64(0))
    trainer = threading.Thread(target=train)
    trainer.start()
    steps = []
    while not done.is_set():
        catalog = open_checkpoint(tmp_path)
        assert catalog.prefix.name == f"model.ckpt-{catalog.step}"
        steps.append(catalog.step)
    trainer.join()
    assert open_checkpoint(tmp_path).step == 199
    assert len(set(steps)) > 1


def empty(_: Path) -> None: ...


def metas(directory: Path) -> None:
    for step in range(3):
        (directory / f"model.ckpt-{step}.meta").touch()


def shards(directory: Path) -> None:
    index_path(write(directory / "model.ckpt-1")).unlink()


def below(directory: Path) -> None:
    write(directory / "older" / "ckpt-1")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (empty, "it is empty"),
        (metas, "found: 3 .meta files but no .index"),
        (shards, "found: 1 .data-* files but no .index"),
        (below, "older"),
    ],
)
def test_a_directory_without_a_checkpoint_says_what_it_holds(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint in") as caught:
        open_checkpoint(tmp_path)
    assert says in caught.value.cause + caught.value.hint


def test_a_prefix_that_is_not_there_says_what_is(tmp_path: Path) -> None:
    write(tmp_path / "model.ckpt-100")
    (tmp_path / "model.ckpt-50.meta").touch()
    with pytest.raises(CheckpointNotFound, match=r"model\.ckpt-10\.index") as caught:
        open_checkpoint(tmp_path / "model.ckpt-10")
    assert "model.ckpt-100" in caught.value.cause
    assert caught.value.hint == f"name what is there: {tmp_path / 'model.ckpt-100'}"
    with pytest.raises(CheckpointNotFound, match=r"model\.ckpt-50\.index") as caught:
        open_checkpoint(tmp_path / "model.ckpt-50")
    assert "left-over" in caught.value.cause
    with pytest.raises(CheckpointNotFound, match="no directory"):
        open_checkpoint(tmp_path / "nowhere" / "model.ckpt-1")


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "file/model.ckpt-1"])
def test_a_path_that_cannot_be_is_not_found(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(tmp_path / path)


V1 = ["model.ckpt-7", "model.ckpt-7-00000-of-00002"]


@pytest.mark.parametrize("file", V1)
def test_damaged_files_of_format_v1_are_refused_however_they_are_named(tmp_path: Path, file: str) -> None:
    """Never passed over for an older checkpoint. (Whole ones: integration/test_families_archives.py.)"""
    for shard in (file, file.replace("00000-of", "00001-of")):
        (tmp_path / shard).write_bytes(b"values")
    (tmp_path / "model.ckpt-7.meta").touch()
    write(tmp_path / "model.ckpt-1")
    state(tmp_path, file.replace("00000-of", "?????-of"))
    for path in (tmp_path, tmp_path / "model.ckpt-7", tmp_path / "model.ckpt-7.meta"):
        with pytest.raises(CorruptFile, match=r"model\.ckpt-7.* is not a checkpoint"):
            open_checkpoint(path)


@pytest.mark.parametrize("file", V1)
def test_a_directory_of_format_v1_without_a_state_file(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"values")
    (tmp_path / "model.ckpt-7.meta").touch()
    with pytest.raises((CorruptFile, MissingShard), match=r"model\.ckpt-7"):
        open_checkpoint(tmp_path)


def test_a_version_that_is_not_read_is_said_at_once(tmp_path: Path) -> None:
    from tests.support.bundles import entry, header, write_index

    write(tmp_path / "model.ckpt-1")
    write_index(tmp_path / "model.ckpt-2", [header(endianness=1), entry("w")])
    with pytest.raises(UnsupportedFormat, match="big-endian"):
        open_checkpoint(tmp_path)


def test_a_name_with_a_slip_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write(tmp_path / "model.ckpt-100")
    with pytest.raises(CheckpointNotFound, match="no directory, no archive") as caught:
        open_checkpoint(tmp_path / "trian")
    assert str(tmp_path / "train") in caught.value.hint


@needs_root
@pytest.mark.parametrize("name", ["lost+found", "variables", "checkpoints"])
def test_a_directory_that_may_not_be_searched_is_looked_over(tmp_path: Path, name: str) -> None:
    """As lost+found is on a disk of its own: an empty directory of checkpoints ended in PermissionError."""
    (tmp_path / name).mkdir(mode=0o700)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.getuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)

    def look() -> str:
        try:
            return f"found {candidates(tmp_path)}"
        except (CheckpointError, OSError) as error:
            return type(error).__name__

    assert as_user(65534, look) == "CheckpointNotFound"
    (tmp_path / name).chmod(0o700)
    write(tmp_path / "model.ckpt-7")
    assert as_user(65534, look) == f"found {[tmp_path / 'model.ckpt-7']}"


GONE = {
    "keras": (families.KERAS, "model.keras"),
    "hdf5": (families.KERAS, "model.h5"),
    "npz": (families.NPZ, "model.npz"),
    "safetensors": (families.SAFETENSORS, "model.safetensors"),
    "v1": (families.V1, "model.ckpt-7"),
    "shards of v1": (families.V1, "model.ckpt-7-?????-of-00002"),
    "saved model": (families.SAVED_MODEL, "1/variables/variables"),
    "bundle": (families.BUNDLE, "model.ckpt-7"),
    "orbax": (families.ORBAX, "7"),
}


@pytest.mark.parametrize("kind", GONE)
def test_a_checkpoint_that_vanishes_between_two_looks_is_a_named_error(tmp_path: Path, kind: str) -> None:
    family, name = GONE[kind]
    with pytest.raises(CheckpointError, match=name.partition("/")[0].partition("-?")[0]):
        family.read(tmp_path / name)
