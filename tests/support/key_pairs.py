"""Key pairs that openssl makes, as publishers of signed models make them."""

from __future__ import annotations

import subprocess
from pathlib import Path


def key_pair(directory: Path, name: str = "publisher", *kind: str) -> tuple[Path, Path]:
    """A private and a public key in PEM, of Ed25519 unless another kind is asked for; made once."""
    private, public = directory / f"{name}.key", directory / f"{name}.pem"
    if not public.exists():
        _openssl("genpkey", "-algorithm", *(kind or ("ed25519",)), "-out", private)
        _openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
