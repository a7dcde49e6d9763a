"""The awkward sources: what real databases hold and what breaks a careless migration.

Each name says what is awkward. Credentials are JSON text: many of the numbers would not survive as floats.
"""

from collections.abc import Iterator

from example_project.demo_data.content import Content, Kind, pem, service_account, to_json
from example_project.demo_data.draw import Draw
from example_project.demo_data.providers import GOOGLE_CLOUD_STORAGE, JINA, NOTION, Provider

KIBIBYTE = 1024
# The largest credentials that the store takes by default, in bytes of canonical JSON.
LIMIT = 64 * KIBIBYTE

PLAIN = '{"integration_secret":"demo-integration-secret-of-an-awkward-source"}'


def awkward(seed: int) -> Iterator[Content]:
    """Yield the content of every awkward source, always the same ones in the same order."""
    yield from _secrets(Draw(seed, "awkward secrets"))
    yield from _numbers()
    yield from _texts()
    yield from _shapes()
    yield from _sizes()
    yield from _beside_credentials()
    yield from _unsupported()
    yield from _without_credentials()


def _source(
    name: str,
    credentials: str | None = PLAIN,
    kind: Kind = "movable",
    *,
    other: str = '{"provider":"notion","authType":"api_key"}',
    provider: Provider = NOTION,
    uri: str = "https://notion.example/demo-awkward",
    version: int | None = None,
) -> Content:
    return Content(provider, name, uri, credentials, other, kind, version)


def _secrets(draw: Draw) -> Iterator[Content]:
    """Yield what providers really ask for, in its worst form."""
    account = to_json({"credentials": service_account(draw), "bucket": "demo-bucket-awkward"})
    yield _source("A field named credentials", account, provider=GOOGLE_CLOUD_STORAGE)
    inner = '{"credentials":{"credentials":{"credentials":"demo-innermost"}}}'
    yield _source("Credentials within credentials within credentials", inner)
    key = to_json({"private_key": pem("RSA PRIVATE KEY", draw, lines=25), "passphrase": "demo-passphrase"})
    yield _source("A private key with newlines", key)
    key = to_json({"private_key": pem("OPENSSH PRIVATE KEY", draw, newline="\r\n") + "\r\n \t"})
    yield _source("A private key with Windows newlines and blanks at its end", key)
    yield _source("Jina with an empty key", '{"api_key":""}', provider=JINA)
    ref = f"source-secret:v1:{draw.uuid()}"
    yield _source("A value that looks like a ref", to_json({"access_token": ref, ref: "demo-token"}))
    envelope = to_json(
        {
            "algorithm": "aes-256-gcm",
            "ciphertext": "ZGVtby1jaXBoZXJ0ZXh0",
            "fingerprint": draw.hex(64),
            "iv": "ZGVtby1pdi0xMjM0",
            "tag": "ZGVtby10YWctMTIzNDU2Nw",
            "version": 1,
            "kid": draw.hex(16),
        }
    )
    yield _source("A value that looks like an encrypted secret", to_json({"access_token": envelope}))
    yield _source("Credentials that look like an encrypted secret", envelope)
    shared = to_json({"access_token": f"demo-shared-token-{draw.hex(40)}"})
    yield _source("A token that two sources share, one", shared)
    yield _source("A token that two sources share, two", shared)


def _numbers() -> Iterator[Content]:
    yield _source("9007199254740993, which is beyond 2^53", '{"account":9007199254740993,"debt":-9007199254740993}')
    yield _source("Its neighbour 9007199254740992", '{"account":9007199254740992,"debt":-9007199254740992}')
    yield _source("1e400, beyond a double", '{"high":1e400,"low":-1e400}')
    yield _source("1e-400, too small for a double", '{"small":1e-400,"smaller":-1e-400}')
    yield _source(
        "Decimals with 30 digits",
        '{"rate":0.123456789012345678901234567891,"total":123456789012345678901234567890.5}',
    )
    yield _source("Trailing zeros", '{"price":1.50,"one":1.0,"hundred":100.00,"zero":0.00,"list":[2.10,2.1]}')
    yield _source("Exponents", '{"large":1e21,"below":123456789e12,"small":1e-7,"upper":1.5E+3}')
    yield _source("An integer of 5,001 digits", f'{{"serial":{"1234567890" * 500}1}}')


def _texts() -> Iterator[Content]:
    astral = '{"🔑":"demo-🗝️-🂡🂢🂣","\\uf900":"demo-sorts-after-astral-keys","名前":"demo-値","𐐷":["👩🏽‍🚀","demo"]}'
    yield _source("Characters beyond the BMP, keys too", astral)
    # The two keys look alike: one character, and a letter with a combining accent.
    yield _source("Keys that only normalisation makes equal", '{"\\u00e9":"demo-one","e\\u0301":"demo-two"}')
    controls = "".join(map(chr, range(1, 0x20)))
    yield _source("Every control character", to_json({"token": f"demo-{controls}\x7f\u0085\u2028\u2029\ufeff-end"}))
    yield _source("A backslash and u0000 as literal text", r'{"token":"demo-\\u0000-\\\\u0000-\"-\/-\\"}')
    hostile = "demo-\\.\n\\N\t%s %(name)s {0} ${HOME} '; SELECT 1; -- $$ \\"
    yield _source("What SQL, COPY and templates take for theirs", to_json({hostile: hostile}))
    yield _source("A key of 10,000 characters", to_json({"k" * 10_000: "demo-long-key"}))
    yield _source("Blanks that belong to a value", '{"api_key":"  demo-key ","  demo-name ":" "}')
    markup = '<script>alert("demo")</script> & <b>prices</b> {{ 7 }} {% now %}'
    yield _source(markup, to_json({"token": markup}), uri='https://notion.example/"><i>demo')
    yield _source("A name\nwith a newline, “quotes”, 🗂 and עברית", PLAIN)


def _shapes() -> Iterator[Content]:
    yield _source("An empty object", "{}")
    deep = '{"level":' * 49 + '{"secret":"demo-at-the-bottom"}' + "}" * 49
    yield _source("50 levels deep", deep)
    keys = to_json({f"field_{number:04}": f"demo-{number}" for number in range(2_000)})
    yield _source("2,000 keys", keys)
    yield _source(
        "Odd keys",
        '{"":"demo-empty-key","__proto__":"demo","constructor":{},"length":0,"10":"demo-ten","9":"demo-nine"}',
    )
    mixed = '{"null":null,"yes":true,"no":false,"empty":[{},[],""],"list":[{"token":"demo"},[["demo"]],0]}'
    yield _source("Null, booleans, lists and empty things within", mixed)
    yield _source("Version 0", PLAIN, version=0)


def _sizes() -> Iterator[Content]:
    yield _source("60 KiB", _of_size(60 * KIBIBYTE))
    yield _source("The limit to the byte", _of_size(LIMIT))
    # With the blanks that jsonb puts into its text this one is over the limit: only canonical bytes count.
    close = {f"field_{number:04}": "demo-" + "x" * 11 for number in range(2_000)}
    yield _source("2,000 keys, close to the limit", to_json(close))
    yield _source("One byte over the limit", _of_size(LIMIT + 1), "too_large")
    yield _source("70 KiB", _of_size(70 * KIBIBYTE), "too_large")
    yield _source("256 KiB", _of_size(256 * KIBIBYTE), "too_large")
    yield _source("1 MiB", _of_size(1024 * KIBIBYTE), "too_large")
    yield _source("22,000 characters of three bytes", to_json({"token": "値" * 22_000}), "too_large")
    metadata = to_json({"provider": "notion", "outline": ["demo " * 200] * 1_048})
    yield _source("1 MiB of other metadata", PLAIN, other=metadata)


def _of_size(size: int) -> str:
    """Return credentials of `size` bytes of canonical JSON."""
    return to_json({"certificate_bundle": "demo-".ljust(size - len('{"certificate_bundle":""}'), "x")})


def _beside_credentials() -> Iterator[Content]:
    """Yield movable sources with more secrets, or more than double precision, elsewhere in their metadata."""
    beside = {
        "An api_key": '{"api_key":"demo-api-key-beside"}',
        "A nextPageToken": '{"nextPageToken":"demo-page-2","syncToken":"demo-sync"}',
        "Nested credentials": '{"auth":{"credentials":{"password":"demo"}},"list":[{"credentials":"demo"}]}',
        "Credentials in another case": '{"Credentials":{"token":"demo-title"},"CREDENTIALS":"demo-upper"}',
        "A URL with user info": '{"proxy":"https://demo-user:demo-password@proxy.example:8443/"}',
        "A ref and an authorization header": (
            '{"credentialRef":"source-secret:v1:3f2c7a52-96d0-4b8e-9a51-0d5f1c6f2b7e",'
            '"headers":{"Authorization":"Bearer demo-bearer"}}'
        ),
        "Digits": '{"cursor":9007199254740993,"weight":1.50,"limit":1e400,"rate":0.12345678901234567890}',
        "Odd keys": '{"":"demo","🔑":{"__proto__":[]},"credentials ":"demo-blank-at-the-end"}',
        "Nothing": "{}",
    }
    for name, other in beside.items():
        yield _source(f"{name} beside credentials", other=other)
    yield _source("A uri with user info", uri="https://demo-user:demo-password@notion.example/demo")


def _unsupported() -> Iterator[Content]:
    for name, credentials in {
        "Credentials that are a string": '"demo-token-on-its-own"',
        "Credentials that are an empty string": '""',
        "Credentials that are JSON in a string": to_json(PLAIN),
        "Credentials that are a string like a ref": '"source-secret:v1:9b0f6c1e-5a34-4d0f-8f0a-6f5f0a1d2c3b"',
        "Credentials that are a string of 100 KiB": to_json("demo-".ljust(100 * KIBIBYTE, "x")),
        "Credentials that are an array": '["demo-user","demo-password"]',
        "Credentials that are an array of objects": '[{"token":"demo-one"},{"token":"demo-two"}]',
        "Credentials that are an empty array": "[]",
        "Credentials that are a number": "9007199254740993",
        "Credentials that are zero": "0",
        "Credentials that are true": "true",
        "Credentials that are false": "false",
    }.items():
        yield _source(name, credentials, "unsupported")


def _without_credentials() -> Iterator[Content]:
    yield _source("Credentials that are null", "null", "none", provider=JINA)
    for name, other in {
        "Empty metadata": "{}",
        "Only Credentials in another case": '{"Credentials":{"access_token":"demo-other-case"}}',
        "Only nested credentials": '{"auth":{"credentials":{"access_token":"demo-nested"}}}',
        "Only an api_key": '{"api_key":"demo-api-key-alone"}',
        "Only a key with a blank at its end": '{"credentials ":{"access_token":"demo-blank"}}',
        "Metadata that is null": "null",
        "Metadata that is an empty array": "[]",
        "Metadata that is an array with the text credentials": '["credentials",{"credentials":{}}]',
        "Metadata that is a string": '"credentials"',
        "Metadata that is a number": "7",
    }.items():
        yield _source(name, None, "none", other=other)
