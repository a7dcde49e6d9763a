"""What may be shown: the rule for sensitive names, and copies of values without what is secret in them.

knowledge-fs removes the keys with such names from metadata whenever it shows it. Here the key stays and its
value is hidden, so that a reader sees that there is something. This decides only what is shown: nothing is
scrubbed by it. Hiding too much costs a reader a moment, hiding too little costs a secret.
"""

from __future__ import annotations

import json
import re
import unicodedata

from kfs_credentials.crypto import parse_json, sensitive
from kfs_credentials.errors import InvalidCredentials

HIDDEN = "[hidden]"
"""What stands in the place of a value that is not shown."""

MAX_DEPTH = 100
"""How deep a value is looked into. What is nested deeper is hidden."""

# Of names in lower case, without anything but a to z and 0 to 9.
_SENSITIVE_NAME = re.compile(
    r"""(?:
        # How knowledge-fs has it.
        (?:api|private|secret|signing)key | token | secret | credential
        | password | passwd | passphrase | pwd | cookie | authorization(?:header)?
        # What it overlooks. `accesskey` is also the end of aws_secret_access_key.
        | (?:access|account|auth|encryption|master|session|shared|ssh|subscription)key
        | passcode | bearer | jwt | creds | dsn | connectionstring | connstr
    ) s? $
    # Innocent at the end of a name, as in "bypass".
    | ^ (?:pass|pat|sessionid|sig|xamzsignature|xgoogsignature) $
    """,
    re.VERBOSE,
)

_REF_PREFIX = "source-secret:v1:"
_SHOWN_OF_ID = 8


def is_sensitive(name: str) -> bool:
    """Return whether a value of this name is to be hidden.

    Case and everything but a to z and 0 to 9 is ignored; the end of the name decides, in singular or plural:
    `API_KEY`, `x-api-key` and `apiKeys` are sensitive, `apiKeyId` and `tokenCount` are not.
    """
    plain = re.sub(r"[^a-z0-9]", "", unicodedata.normalize("NFKC", name).lower())
    return _SENSITIVE_NAME.search(plain) is not None


@sensitive
def redacted(value: object) -> object:
    """Return a copy of a JSON value (as `parse_json` returns it) in which what is secret is `HIDDEN`.

    Hidden are, at any depth: values under sensitive names; the value of a name and value pair
    (`{"name": "Authorization", "value": ...}`); envelopes of ours; and in every text, keys included, what
    `redacted_text` hides. Everything else is as it was, in the same order. Never raises.
    """
    return _redacted(value, MAX_DEPTH)


@sensitive
def redacted_text(text: str) -> str:
    """Return a text in which what looks like a secret is `HIDDEN`, whatever the text is called.

    Hidden are: private keys in PEM; the user info of URLs (https://user:pass@host becomes
    https://[hidden]@host); values that a sensitive name stands in front of (password=..., "token": ...,
    Authorization: ...); and tokens whose shape gives them away. A text that is itself JSON, with something to
    hide in it, is hidden as a whole. Never raises.
    """
    return _redacted_text(text, MAX_DEPTH)


@sensitive
def hidden_paths(value: object) -> list[str]:
    """Return where in a JSON value `redacted` hides something that may be a secret: paths such as `$.auth.token`.

    Not where a sensitive name has no value to hide: null, true, false, an empty text, list or object. No path holds a
    value: what looks like one in a name is hidden in it. What is nested deeper than MAX_DEPTH is not looked into.
    Never raises.
    """
    found: list[str] = []
    _find_hidden(value, "$", MAX_DEPTH, found)
    return found


def short_ref(ref: str) -> str:
    """Return the start of a ref, enough to tell it from others: `source-secret:v1:1234abcd…`."""
    shown = _SHOWN_OF_ID + (len(_REF_PREFIX) if ref.startswith(_REF_PREFIX) else 0)
    return ref if len(ref) <= shown else f"{ref[:shown]}…"


def _redacted(value: object, levels: int) -> object:
    if isinstance(value, str):
        return _redacted_text(value, levels)
    if not isinstance(value, dict | list):
        return value
    if not levels or _is_envelope(value):
        return HIDDEN
    if isinstance(value, list):
        return [_redacted(item, levels - 1) for item in value]
    shown: dict[str, object] = {}
    for key, member in value.items():
        hide = is_sensitive(key) or (key == "value" and _is_sensitive_pair(value))
        key = _redacted_text(key, levels - 1)
        while key in shown:  # it differs from another only in what is hidden
            key = f"{key} ({len(shown) + 1})"
        shown[key] = HIDDEN if hide else _redacted(member, levels - 1)
    return shown


def _find_hidden(value: object, path: str, levels: int, found: list[str]) -> None:
    if isinstance(value, str):
        if _redacted_text(value, levels) != value:
            found.append(path)
    elif isinstance(value, list):
        for index, item in enumerate(value if levels else ()):
            _find_hidden(item, f"{path}[{index}]", levels - 1, found)
    elif isinstance(value, dict) and _is_envelope(value):
        found.append(path)
    elif isinstance(value, dict):
        for key, member in value.items() if levels else ():
            shown = _redacted_text(key, levels - 1)
            step = f"{path}.{shown}" if shown.isidentifier() else f"{path}[{json.dumps(shown, ensure_ascii=False)}]"
            if shown != key:
                found.append(step)
            elif not (is_sensitive(key) or (key == "value" and _is_sensitive_pair(value))):
                _find_hidden(member, step, levels - 1, found)
            elif member not in (None, "", [], {}) and not isinstance(member, bool):
                found.append(step)


def _is_envelope(value: dict[str, object] | list[object]) -> bool:
    return isinstance(value, dict) and {"algorithm", "ciphertext", "iv", "tag"} <= value.keys()


def _is_sensitive_pair(value: dict[str, object]) -> bool:
    names = [value.get("name"), value.get("key")]
    return any(isinstance(name, str) and is_sensitive(name) for name in names)


def _redacted_text(text: str, levels: int) -> str:
    if text.lstrip()[:1] in ("{", "[", '"') and _is_telling_json(text, levels):
        return HIDDEN
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _USER_INFO.sub(f"//{HIDDEN}@", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    text = _without_named_values(text)
    return _TOKEN.sub(HIDDEN, text)


def _is_telling_json(text: str, levels: int) -> bool:
    """Return whether the text is JSON that itself has something to hide."""
    try:
        value = parse_json(text)
    except InvalidCredentials:
        return False
    return not levels or _redacted(value, levels - 1) != value


def _without_named_values(text: str) -> str:
    parts: list[str] = []
    end = 0
    for name in _NAME.finditer(text):
        if name.start() < end or not is_sensitive(name[1]):
            continue
        if value := (_HEADER_VALUE if name[2] == ":" else _VALUE).match(text, name.end()):
            parts += text[end : name.end()], HIDDEN
            end = value.end()
    return "".join([*parts, text[end:]])


# Each takes time that grows no faster than the text: it is a tenant's, and may be made to hurt.

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    r".*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|\Z)",
    re.DOTALL,
)
_USER_INFO = re.compile(
    r"""//(?:
        # A user, and a password in which somebody forgot to escape a / or an @: up to the last @ of the word.
        # Not a host and its port, as in http://host:8080/@name.
        [^\s/?\#:@]* : (?!\d{0,5}[/?\#]) \S{0,1024}
        # As RFC 3986 (section 3.2.1) has it.
        | [^\s/?\#]*
    )@""",
    re.VERBOSE,
)
_SCHEME = re.compile(
    r"""\b(
        bearer
        | basic (?= \s+ (?=\S*(?-i:[a-z][A-Z]|[\d=])) [a-z0-9+/]{8,}={0,2} (?!\S) )
    ) \s+ \S+""",
    re.VERBOSE | re.IGNORECASE,
)
# One or two words, and a colon or an equals sign.
_NAME = re.compile(r"""(?<![\w.-])((?:[\w.-]+[ ])?[\w.-]+)[\\"']*\s*([:=])\s*""")
_QUOTED_OR_NESTED = r"""(?!\[hidden\]) (?: [\[{].* | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*'"""
_VALUE = re.compile(rf"{_QUOTED_OR_NESTED} | [^\s&;]+ )", re.VERBOSE | re.DOTALL)
_HEADER_VALUE = re.compile(rf"{_QUOTED_OR_NESTED} | [^\n]+ )", re.VERBOSE | re.DOTALL)
_TOKEN = re.compile(
    r"""(?<![\w-]) (?:
        eyJ[\w-]+ \. [\w-]+ \. [\w-]*                # JWT (RFC 7519): the base64 of {" to begin with
        | gh[oprsu]_\w{16,} | github_pat_\w{16,}     # GitHub
        | glpat-[\w-]{16,}                           # GitLab
        | xox[a-z]-[\w-]{10,}                        # Slack
        | ya29\.[\w-]{16,} | AIza[\w-]{30,}          # Google
        | ntn_\w{16,} | secret_\w{32,}               # Notion
        | hv[bs]\.[\w-]{16,}                         # Vault
        | sk-[\w-]{16,}                              # OpenAI, and those who took it over
    )""",
    re.VERBOSE,
)
