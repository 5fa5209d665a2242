"""Secrets stay out of the record: values of the environment that an error message or a traceback repeats."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY|AUTH|COOKIE|DSN", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")  # user:password@host
LEAST_LENGTH = 6  # shorter values are words such as "true": to take them out would spoil the message


def redact(text: str, environ: Mapping[str, str]) -> str:
    """The text without values of variables whose names look secret, and without passwords in URLs.

    >>> redact("401 for hf_abcdefgh at https://me:pw@host/x", {"HF_TOKEN": "hf_abcdefgh"})
    '401 for [HF_TOKEN] at https://[password]@host/x'
    """
    secrets = {value: name for name, value in environ.items() if len(value) >= LEAST_LENGTH and _SECRET.search(name)}
    for value in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(value, f"[{secrets[value]}]")
    return _IN_URL.sub("[password]", text)
