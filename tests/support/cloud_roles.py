"""A stand-in for what gives a role's credentials in Amazon's cloud: by tokens, to containers, to machines."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.certificates import Pair
from tests.support.http_proxy import serving

TOKEN = "t0ken0fTheTests"
_STS = """<R><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{AccessKeyId}</AccessKeyId><SecretAccessKey>{SecretAccessKey}</SecretAccessKey>
<SessionToken>{Token}</SessionToken><Expiration>{Expiration}</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></R>"""


@dataclass
class Roles:
    """What was asked for. Credentials that are given last so many seconds; the n-th are called `GIVENn`."""

    seconds: float = 3600.0
    is_there: bool = True
    asked: list[str] = field(default_factory=list)
    given: int = 0

    def give(self) -> dict[str, str]:
        self.given += 1
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.seconds))
        found = {"AccessKeyId": f"GIVEN{self.given}", "SecretAccessKey": TOKEN, "Token": TOKEN}
        return {**found, "Expiration": until, "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": until}


@contextmanager
def role_server(pair: Pair | None = None) -> Iterator[tuple[str, Roles]]:
    """Its address, which is asked by TLS if there is a certificate."""
    roles = Roles()

    class Answering(BaseHTTPRequestHandler):
        def take(self) -> None:
            roles.asked.append(self.path)
            if not roles.is_there:
                self.send_error(404)
            elif self.path == "/latest/api/token":
                self.tell(TOKEN)
            elif f"WebIdentityToken={TOKEN}" in self.path:
                self.tell(_STS.format(**roles.give()))
            elif TOKEN not in (self.headers["Authorization"], self.headers["X-aws-ec2-metadata-token"]):
                self.send_error(401)
            elif self.path.endswith("/security-credentials/"):
                self.tell("role")
            else:
                self.tell(json.dumps(roles.give()))

        do_GET = do_PUT = do_POST = take

        def tell(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *rest: Any) -> None:
            pass

    tls = None
    if pair is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pair.cert, pair.key)
    with serving(Answering, tls) as address:
        yield address, roles
