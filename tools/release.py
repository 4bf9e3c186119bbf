"""`make release`: what others install, in dist/: two wheels, an sdist, checksums, a bill of materials.

The second wheel is `exporter/training/trainer_side.py` alone, for trainers on Python 3.6 and later.

The same commit gives the same bytes: both are built from the commit's own files (not from the working tree),
with the commit's time, fixed modes and fixed owners. The wheel is then installed in an empty environment that
sees nothing of the clone, and runs the first commands of the guide there.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
BUILT_BY = "setuptools==84.2.1"
"""Its version stands in the wheel: with any, the same commit would give other bytes next month."""
EXTRAS = "server,agent,stores"
"""Of the wheel that is tried: what a machine needs that exports, serves, and keeps servers fresh."""

TRAINER, TRAINER_FILE = "export_model_trainer", "exporter/training/trainer_side.py"
_TRAINER_METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: The trainer's side of export-model: increments between the checkpoints of a TensorFlow training
License: Apache-2.0
Requires-Python: >=3.6
"""
"""No dependencies: the trainer has its TensorFlow, and numpy with that."""

_TRAINER_WHEEL = "Wheel-Version: 1.0\nGenerator: make release\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

_TRIED = (
    ("python", "ranker/train.py", "--out", "train", "--steps", "20"),
    ("export-model", "--ckpt-dir", "train", "--model", "ranker/model.py:serving", "--out", "models/ranker"),
    ("export-model", "verify", "models/ranker", "--bytes"),
    ("serve-model", "agent", "--help"),
)
"""Commands of the guide's first page, and one that imports the agent's libraries."""


def main() -> None:
    """Build, try, and write down what was built."""
    commit = _output("git", "rev-parse", "HEAD")
    if _output("git", "status", "--porcelain"):
        print(
            "The working tree has changes; what is built is the last commit, without them.", file=sys.stderr
        )
    epoch = int(_output("git", "show", "-s", "--format=%ct", commit))
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _build(commit, epoch, Path(scratch))
        _require_data(wheel)
        version = wheel.name.split("-")[1]
        trainer = DIST / f"{TRAINER}-{version}-py3-none-any.whl"
        trainer.write_bytes(trainer_wheel(_output("git", "show", f"{commit}:{TRAINER_FILE}"), version, epoch))
        environment = Path(scratch, "environment")
        _try_wheel(wheel, environment, Path(scratch, "elsewhere"))
        _try_trainer(trainer, environment)
        bill = DIST / f"{wheel.name.removesuffix('.whl')}.cdx.json"
        _bill_of_materials(environment, bill)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(DIST.iterdir())
    ]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.relative_to(ROOT)}")


def _build(commit: str, epoch: int, scratch: Path) -> Path:
    """Build sdist and wheel of a commit into dist/; the wheel."""
    source = scratch / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    constraint = scratch / "constraint.txt"
    constraint.write_text(f"{BUILT_BY}\n")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(constraint)}
    # The wheel's entries take their modes from the files: the builder's umask must not decide.
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", DIST, "."], cwd=source, check=True, env=environment,
        umask=0o022, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    sdist.write_bytes(normalised(sdist.read_bytes(), epoch))
    return wheel


def normalised(sdist: bytes, epoch: int) -> bytes:
    """A .tar.gz with the same files, sorted; times, modes and owners say nothing of the builder."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as before,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=9, mtime=epoch) as file:
        file.write(plain.getvalue())
    return packed.getvalue()


def trainer_wheel(code: str, version: str, epoch: int) -> bytes:
    """The bytes of the wheel that has the trainer's side as its one module."""
    about = f"{TRAINER}-{version}.dist-info"
    files = {
        f"{TRAINER}.py": f"{code.rstrip()}\n",
        f"{about}/METADATA": _TRAINER_METADATA.format(name=TRAINER.replace("_", "-"), version=version),
        f"{about}/WHEEL": _TRAINER_WHEEL,
    }
    listed = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in files.items()]
    record = f"{about}/RECORD"
    files[record] = "\n".join([*listed, f"{record},,"]) + "\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return packed.getvalue()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _require_data(wheel: Path) -> None:
    """Refuse a wheel that lacks a file of the packages which git has: pages, templates, markers of types."""
    tracked = set(_output("git", "ls-files", "exporter", "serving").splitlines())
    missing = tracked - set(zipfile.ZipFile(wheel).namelist())
    if missing:
        raise SystemExit(f"the wheel lacks {', '.join(sorted(missing))}: see package-data in pyproject.toml")


def _try_wheel(wheel: Path, environment: Path, elsewhere: Path) -> None:
    """Install the wheel in an empty environment, and run the guide's commands in an empty directory.

    Raises:
        SystemExit: a command failed.
    """
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    scripts = environment / "bin"
    _run([scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"], elsewhere.parent)
    _run([scripts / "python", "-m", "pip", "check"], elsewhere.parent)
    shutil.copytree(ROOT / "examples" / "ranker", elsewhere / "ranker")  # stands for the user's own code
    for name, *arguments in _TRIED:
        _run([scripts / name, *arguments], elsewhere)


def _try_trainer(wheel: Path, environment: Path) -> None:
    """Install the trainer's wheel, import it, and remove it: it is no part of what the bill lists."""
    python = environment / "bin/python"
    _run([python, "-m", "pip", "install", "--quiet", "--no-index", wheel], environment)
    _run([python, "-c", f"from {TRAINER} import IncrementCallback, IncrementHook"], environment)
    _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", TRAINER], environment)


def _bill_of_materials(environment: Path, out: Path) -> None:
    """Write what the environment holds as CycloneDX JSON: names, versions and licences."""
    scripts = environment / "bin"
    # What installed the wheel is none of its parts.
    _run([scripts / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], environment)
    _run(
        [
            sys.executable, "-m", "cyclonedx_py", "environment", scripts / "python",
            "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-format", "JSON",
            "--output-file", out,
        ],
        ROOT,
    )  # fmt: skip
    out.write_text(of_version(out.read_text(), out.name.split("-")[1]))


def of_version(bill: str, version: str) -> str:
    """A bill of materials that says of which release it is, which pyproject.toml leaves to the code."""
    document = json.loads(bill)
    document["metadata"]["component"]["version"] = version
    return f"{json.dumps(document, indent=2)}\n"


def _run(command: Sequence[str | Path], directory: Path) -> None:
    print("$", *(Path(part).name if Path(part).is_absolute() else part for part in command), flush=True)
    # Neither the clone nor settings of its environment may be seen.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=directory, env=clean, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
