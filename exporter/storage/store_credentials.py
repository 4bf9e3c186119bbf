"""Where credentials come from, and what is said where there are none.

obstore takes them from the environment; here stands what it looks for, in that order.
"""

from __future__ import annotations

import os
import re

_AWS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
"""Variables that name credentials, or who gives them: the first of these that are set together count."""
_NOT_GIVEN = re.compile(
    r"token request|token file|performing POST REDACTED|/latest/(?:api/token|meta-data)\b"
)
"""What obstore says of asking for credentials, and not of asking the store."""

HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other clouds",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or what else identifies you",
}
"""What to set, by the scheme of a URL."""


def not_given(scheme: str, said: str) -> str:
    """Who was asked for credentials and gave none, by an error's text; empty if that is not the error."""
    if "bulk delete" in said:  # a POST, too, and to the store itself
        return ""
    container = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or "http://169.254.170.2/"
    if not _NOT_GIVEN.search(said) and not (scheme == "s3" and container in said):
        return ""
    if scheme != "s3":
        return "the account that is named, or the role of this machine, gives none"
    if named := next((names for names in _AWS if all(map(os.environ.get, names))), None):
        return f"{' with '.join(named)} gives none"
    looked_for = ", ".join(" with ".join(names) for names in _AWS)
    return f"none of {looked_for} is set, and the role of this machine gives none"
