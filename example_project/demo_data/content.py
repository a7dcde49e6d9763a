"""What a source of the demo says: its credentials and the rest of its metadata, as JSON text.

Text, because a number that Python has read into a float has lost digits that PostgreSQL keeps.
"""

import json
from dataclasses import dataclass
from typing import Literal

from example_project.demo_data.draw import Draw
from example_project.demo_data.providers import JINA, PROVIDERS, Provider

# What becomes of the credentials: moved; left where they are, since they are no object; left where they are,
# since they have more canonical bytes than the store takes by default; nothing, since there are none.
Kind = Literal["movable", "unsupported", "too_large", "none"]

TEAMS = (
    "Sales",
    "Support",
    "Legal",
    "Finance",
    "People",
    "Research",
    "Product",
    "Field service",
    "Marketing",
)
TOPICS = (
    "contracts",
    "handbook",
    "meeting notes",
    "release notes",
    "photos",
    "price lists",
    "questions and answers",
    "onboarding",
    "technical drawings",
    "incident reports",
    "translations",
)
LANGUAGES = ("de", "en", "es", "fr", "ja", "pt", "tr", "zh")
TOKEN_LENGTHS = (40, 64, 96, 160)

# One in so many ordinary sources needs no credentials.
WITHOUT_CREDENTIALS = 60


@dataclass(frozen=True, slots=True)
class Content:
    """What one source says.

    `credentials` is the JSON text of `metadata.credentials`, or None where that key is missing; `other` is
    the JSON text of the metadata without it. `version` is given only where it matters.
    """

    provider: Provider
    name: str
    uri: str
    credentials: str | None
    other: str
    kind: Kind
    version: int | None = None

    @property
    def metadata(self) -> str:
        """The JSON text of the whole metadata."""
        if self.credentials is None:
            return self.other
        rest = "}" if self.other == "{}" else f",{self.other[1:]}"
        return f'{{"credentials":{self.credentials}{rest}'


def to_json(value: object) -> str:
    """Return compact JSON text, characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def ordinary(draw: Draw) -> Content:
    """Return the content of a source as most of them are."""
    needs_credentials = draw.below(WITHOUT_CREDENTIALS) > 0
    provider = draw.pick(PROVIDERS) if needs_credentials else JINA
    credentials = {field: field_value(field, draw) for field in provider.fields}
    return Content(
        provider=provider,
        name=f"{draw.pick(TEAMS)} {draw.pick(TOPICS)} ({provider.title})",
        uri=provider.uri.format(draw.hex(8)),
        credentials=to_json(credentials) if needs_credentials else None,
        other=to_json(other_metadata(provider, draw)),
        kind="movable" if needs_credentials else "none",
    )


def other_metadata(provider: Provider, draw: Draw) -> dict[str, object]:
    """Return what stands beside the credentials of an ordinary source; nothing in it is secret."""
    return {
        "provider": provider.name,
        "authType": provider.auth,
        "sync": {
            "intervalMinutes": draw.pick((15, 60, 360, 1440)),
            "documents": draw.below(20_000),
            "lastRunAt": draw.moment().isoformat(),
        },
        "languages": [draw.pick(LANGUAGES)],
        "recursive": draw.below(2) == 0,
    }


def field_value(field: str, draw: Draw) -> str:
    """Return a made-up value for one of the fields that providers ask for."""
    match field:
        case "credentials":
            return service_account(draw)
        case "bucket":
            return f"demo-bucket-{draw.hex(8)}"
        case "region_name":
            return f"demo-region-{1 + draw.below(6)}"
        case "gitlab_url":
            return f"https://gitlab-{1 + draw.below(40)}.example"
        case "subdomain":
            return f"demo-company-{draw.below(900)}"
        case "user_email":
            return f"demo-user-{draw.below(5_000)}@mail.example"
        case "user_login" | "user_id" | "tenant_id" | "access_key_id" | "client_id":
            return f"demo-{field.replace('_', '-')}-{draw.hex(16)}"
        case _:
            return f"demo-{field.replace('_', '-')}-{draw.hex(draw.pick(TOKEN_LENGTHS))}"


def service_account(draw: Draw) -> str:
    """Return the JSON document of a service account, private key included, as one string."""
    project = f"demo-project-{draw.hex(6)}"
    return json.dumps(
        {
            "type": "service_account",
            "project_id": project,
            "private_key_id": f"demo-{draw.hex(32)}",
            "private_key": pem("PRIVATE KEY", draw),
            "client_email": f"demo-reader@{project}.example",
            "token_uri": "https://oauth2.example/token",
        },
        indent=2,
    )


def pem(label: str, draw: Draw, *, lines: int = 6, newline: str = "\n") -> str:
    """Return text with the outline of a PEM document (RFC 7468) that holds no key."""
    body = [f"demo{draw.hex(60)}" for _ in range(lines)]
    return newline.join((f"-----BEGIN {label}-----", *body, f"-----END {label}-----", ""))
