"""Detection of credentials in text: well-known key formats, and high-entropy words after a name such as "token".

Digests, hashes and run names are not credentials, so high entropy alone is not enough.
"""

from __future__ import annotations

import math
import re
from collections import Counter

_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22}"
    r"|\bhf_[A-Za-z0-9]{30,40}\b"
    r"|\bsk-(?:proj-|ant-[a-z0-9]{2,8}-)?[A-Za-z0-9_-]{20,}"
    r"|\bxox[abprs]-[0-9A-Za-z-]{10,}"
    r"|\bAIza[0-9A-Za-z_-]{35}"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
    r"|://[^\s/@:\"']{0,100}:[^\s/@\"']{1,200}@"  # user:password@host
)
_PASSWORD = re.compile(r"""(?:password|passwd|passphrase)["']?\s?[=:]\s?(["']?)([^\s"',;&]{6,200})""", re.IGNORECASE)
_NAMED = re.compile(
    r"""(?:secret|token|api_?key|access_?key|private_?key|credentials?|authorization|bearer)["']?\s?[=: ]\s?["']?"""
    r"""([A-Za-z0-9_+/=.-]{16,400})""",
    re.IGNORECASE,
)
_EMPTY = re.compile(r"\[\w+\]|\*+|<.*>|\$.*|\{.*|none|null|true|false|redacted|x+|\.+", re.IGNORECASE)
# Bits of entropy per character: English words in a row have less, random letters and digits have more.
LEAST_BITS = 3.5
MOST_TEXT = 10_000  # characters that are matched at once


def is_secret(text: str) -> bool:
    """Return whether a line appears to contain a credential.

    >>> is_secret("cloning https://me:hunter2@host/x"), is_secret("tokens=4096 digest 9f86d081884c7d659a2feaa0c55ad015")
    (True, False)
    """
    text = text[:MOST_TEXT]
    if _FORMS.search(text):
        return True
    for match in _PASSWORD.finditer(text):
        # "password: required" is a sentence.
        is_value = "=" in match.group(0) or match.group(1)
        if is_value and not _EMPTY.fullmatch(match.group(2)):
            return True
    return any(_is_random(match.group(1)) for match in _NAMED.finditer(text))


def _is_random(word: str) -> bool:
    """Return whether a word mixes letters and digits at random, as keys do; paths, versions and sentences do not."""
    if _EMPTY.fullmatch(word) or not re.search(r"\d", word) or not re.search(r"[A-Za-z]", word) or word.count("/") > 1:
        return False
    counts = Counter(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    # A short word cannot reach LEAST_BITS: its entropy is at most log2 of its length.
    return bits >= min(LEAST_BITS, 0.85 * math.log2(len(word)))
