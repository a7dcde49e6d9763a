"""Data source providers and the credentials that their plugins ask for.

Field names and kinds are facts from the public plugins of langgenius/dify-official-plugins
(datasources/*/provider/*.yaml). The addresses use reserved host names (RFC 2606).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to connect to a kind of data source, in the plugins' own terms.

    `fields` names the credentials that it asks for.
    """

    name: str
    type: str
    auth: str
    fields: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name that people know."""
        return _TITLES_AND_URIS[self.name][0]

    @property
    def uri(self) -> str:
        """The address of a source of this provider: a template with one place for an identifier."""
        return _TITLES_AND_URIS[self.name][1]


_CLIENT = ("access_token", "refresh_token", "client_id", "client_secret")

GOOGLE_CLOUD_STORAGE = Provider("google_cloud_storage", "file_storage", "api_key", ("credentials", "bucket"))
NOTION = Provider("notion", "online_document", "api_key", ("integration_secret",))
# The key is optional: an empty one is legal, and so is none.
JINA = Provider("jina", "website_crawl", "api_key", ("api_key",))

PROVIDERS = (
    GOOGLE_CLOUD_STORAGE,
    NOTION,
    JINA,
    Provider("google_drive", "online_drive", "oauth2", (*_CLIENT, "user_email")),
    Provider("notion", "online_document", "oauth2", ("access_token",)),
    Provider("aws_s3_storage", "online_drive", "api_key", ("secret_access_key", "access_key_id", "region_name")),
    Provider("confluence_datasource", "online_document", "api_key", ("access_token",)),
    Provider("github", "online_document", "oauth2", (*_CLIENT, "user_login")),
    Provider("github", "online_document", "api_key", ("access_token",)),
    Provider("gitlab", "online_document", "oauth2", (*_CLIENT, "gitlab_url", "user_login")),
    Provider("gitlab", "online_document", "api_key", ("access_token", "gitlab_url")),
    Provider("sharepoint", "online_drive", "oauth2", ("access_token", "refresh_token", "subdomain", "tenant_id")),
    Provider(
        "onedrive_datasource",
        "online_drive",
        "oauth2",
        ("access_token", "refresh_token", "tenant_id", "user_email"),
    ),
    Provider("dropbox", "online_drive", "oauth2", _CLIENT),
    Provider("dropbox", "online_drive", "api_key", ("access_token",)),
    Provider("microsoft_teams", "online_document", "oauth2", (*_CLIENT, "tenant_id", "user_id")),
    Provider("tavily_datasource", "website_crawl", "api_key", ("tavily_api_key",)),
)

_TITLES_AND_URIS = {
    "google_cloud_storage": ("Google Cloud Storage", "gs://demo-bucket-{}"),
    "notion": ("Notion", "https://notion.example/{}"),
    "jina": ("Jina Reader", "https://docs-{}.example/"),
    "google_drive": ("Google Drive", "https://drive.example/folders/{}"),
    "aws_s3_storage": ("AWS S3", "s3://demo-bucket-{}"),
    "confluence_datasource": ("Confluence", "https://confluence.example/wiki/spaces/{}"),
    "github": ("GitHub", "https://github.example/demo/{}"),
    "gitlab": ("GitLab", "https://gitlab.example/demo/{}"),
    "sharepoint": ("SharePoint", "https://sharepoint.example/sites/{}"),
    "onedrive_datasource": ("OneDrive", "https://onedrive.example/drives/{}"),
    "dropbox": ("Dropbox", "https://dropbox.example/home/{}"),
    "microsoft_teams": ("Microsoft Teams", "https://teams.example/channels/{}"),
    "tavily_datasource": ("Tavily", "https://help-{}.example/"),
}
