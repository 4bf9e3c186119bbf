"""Certificates for servers and clients on loopback, signed by authorities that openssl makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from msgspec import Struct


class Pair(Struct):
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """An authority in a directory of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory / name
        self.directory.mkdir(parents=True)
        self.own = Pair(self.directory / "ca.pem", self.directory / "ca.key")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", self.own.key, "-out", self.own.cert, "-days", "2", "-subj", f"/CN={name}"),
        )

    def sign(self, name: str, alternatives: str = "") -> Pair:
        """A certificate for `name`; alternatives as openssl writes them: `DNS:localhost,IP:127.0.0.1`."""
        made = Pair(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", made.key, "-out", request, "-subj", f"/CN={name}"),
        )
        extensions.write_text(f"subjectAltName={alternatives or f'DNS:{name}'}\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.own.cert, "-CAkey", self.own.key),
            *("-CAcreateserial", "-days", "2", "-out", made.cert, "-extfile", extensions),
        )
        return made


class Certified:
    """What is needed for TLS on both sides: our authority's certificates, and those of a stranger."""

    name = "model.test"

    def __init__(self, directory: Path) -> None:
        ours, other = Authority(directory, "ours"), Authority(directory, "other")
        self.ca, self.other_ca = ours.own.cert, other.own.cert
        self.server = ours.sign("server", f"DNS:{self.name},IP:127.0.0.1")
        self.client, self.elsewhere = ours.sign("client"), ours.sign("elsewhere")
        self.stranger = other.sign("stranger")

    def config(self, file: Path, *, verify: bool, pair: Pair | None = None) -> Path:
        """An `SSLConfig`, as TF Serving reads it."""
        pair = pair or self.server
        parts = {"server_key": pair.key, "server_cert": pair.cert, "custom_ca": self.ca}
        lines = [f"{name}: {json.dumps(path.read_text())}" for name, path in parts.items()]
        file.write_text("\n".join([*lines, f"client_verify: {str(verify).lower()}"]))
        return file


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
