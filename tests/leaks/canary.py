"""The canary: a made-up credential that must be found in no place but the store's ciphertext, in no form."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator

CANARY = "canary-7c1e54d09ab3f826"
OTHER_CANARY = "canary-then-e9930b5d1c47"
"""What the credentials are changed to meanwhile."""

CREDENTIALS = {"access_token": CANARY}


def forms(text: str) -> dict[str, bytes]:
    """Return what to look for, by name: the text, and what somebody could make of it without a key."""
    value = text.encode()
    document = json.dumps({"access_token": text}, separators=(",", ":")).encode()
    found = {
        "as it is": value,
        "in hexadecimal": value.hex().encode(),
        "as a list of bytes": " ".join(map(str, value)).encode(),  # debug_print_plan
        "percent-encoded": "".join(f"%{byte:02x}" for byte in value).encode(),
        "reversed": value[::-1],
    }
    for shift in range(3):
        # Wherever it stands in what is encoded: the part that depends on nothing before and after.
        encoded = base64.b64encode(b"x" * shift + value)
        found[f"base64, {shift} bytes in"] = encoded[4 * ((shift + 2) // 3) : -4]
    for name, content in (("value", value), ("document", document)):
        for algorithm in ("md5", "sha1", "sha256", "sha512"):
            digest = hashlib.new(algorithm, content).digest()
            found[f"{algorithm} of the {name}"] = digest.hex().encode()
            found[f"{algorithm} of the {name}, base64"] = base64.b64encode(digest).rstrip(b"=")
    return found


FORMS = {
    **forms(CANARY),
    **{f"the other one, {name}": form for name, form in forms(OTHER_CANARY).items()},
}


def hits(content: bytes | str) -> Iterator[str]:
    """Yield the name of each form of the canary that is in the content, letter case aside, with what is around it."""
    found = content.encode() if isinstance(content, str) else content
    folded = found.lower()
    for name, form in FORMS.items():
        place = folded.find(form.lower())
        if place >= 0:
            yield f"{name}: {found[max(0, place - 100) : place + 100]!r}"
