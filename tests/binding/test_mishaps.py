"""Another directory, an empty mount, another key, a copy, a restore: nothing is put or erased until a person looked."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from kfs_credentials.binding import EXPLANATIONS
from kfs_credentials.checks import check_binding
from kfs_credentials.errors import BindingBroken, BindingProblem, NoCredentials, StoreMisconfigured
from kfs_credentials.services import create_source, resolve_credentials, rotate_credentials
from tests.binding.scenes import MISHAPS, TENANT, Scene, add_sources, an_empty_directory, bring_back, contents, retire
from tests.migrations.hosts import Host

Mishap = tuple[Scene, Host, BindingProblem]


@pytest.fixture(params=MISHAPS)
def mishap(request: pytest.FixtureRequest, scene: Scene) -> Mishap:
    """Something happens; the scene, the database to work on, the problem."""
    happen, problem = MISHAPS[request.param]
    return scene, happen(scene), problem


def test_nothing_is_put_or_erased(mishap: Mishap) -> None:
    """Every command that would refuses before it touches a row, says why, and which command resolves it."""
    scene, host, problem = mishap
    retire(host, 1)
    conflict = bring_back(host, '{"token": "another"}')
    (unsupported,) = add_sources(host, 1)
    host.run(f"""UPDATE sources SET metadata = '{{"credentials": "token"}}' WHERE id = '{unsupported}'""")
    before = contents(host, scene.directory)
    for command in (
        ["run_credential_backfill"],
        ["run_secret_cleanup"],
        ["run_secret_cleanup", "--due"],
        ["reencrypt_secrets"],
        ["settle_unsupported_credentials", "--all", "--wrap", "token"],
        ["settle_credential_conflict", "--source", conflict, "--keep", "ref", "--yes"],
        ["settle_credential_conflict", "--source", conflict, "--keep", "plaintext", "--yes"],
        ["verify_credentials", "--scrub-same", "--yes"],
        ["verify_credentials", "--deep", "--erase-unknown", "--yes"],
    ):
        outcome = scene.run(*command, "--database", host.alias)
        assert outcome.code == 1
        what, do = EXPLANATIONS[problem]
        assert outcome.err == (
            f"CommandError: secret store 'default': {what}. Nothing is put or erased. {do}: "
            "`manage.py bind_secret_store`\n"
        )
    assert contents(host, scene.directory) == before


def test_services_put_nothing(mishap: Mishap) -> None:
    """Nothing is reserved for a secret that would go into a wrong store."""
    scene, host, problem = mishap
    source, space = host.rows("SELECT id, knowledge_space_id FROM sources WHERE credential_ref IS NOT NULL")[0]
    before = contents(host, scene.directory)
    value = {"token": "made-up"}
    values: dict[str, Any] = {"tenant": TENANT, "credentials": value, "using": host.alias}
    with pytest.raises(BindingBroken) as caught:
        rotate_credentials(source_id=source, **values)
    assert caught.value.problem is problem
    with pytest.raises(BindingBroken):
        create_source(space_id=space, type="drive", name="Source", uri="https://files.example/", **values)
    assert contents(host, scene.directory) == before


def test_the_deploy_check_says_it(mishap: Mishap, monkeypatch: pytest.MonkeyPatch) -> None:
    _, host, problem = mishap
    monkeypatch.setattr("kfs_credentials.checks.router.db_for_write", lambda *_, **__: host.alias)
    (found,) = check_binding()
    assert (found.id, found.is_serious()) == ("kfs_credentials.E012", True)
    assert EXPLANATIONS[problem][0] in found.msg
    with pytest.raises(SystemCheckError, match="bind_secret_store"):
        call_command("check", deploy=True, tags=["kfs_credentials"])


def test_binding_resolves_it(mishap: Mishap) -> None:
    """An operator looks and confirms; then work goes on where its secrets can be read."""
    scene, host, problem = mishap
    asked = scene.run("bind_secret_store", "--database", host.alias, "--yes")
    if problem in (BindingProblem.NO_PROBE, BindingProblem.UNREADABLE):
        # Not the store of these secrets, or not the key: it is not bound by a mere yes.
        assert asked.code == 1
        assert "Not one of " in asked.err
        assert "Nothing was changed. If they are lost, say --none-readable." in asked.err
        forced = scene.run("bind_secret_store", "--database", host.alias, "--yes", "--none-readable")
        assert forced.code == 0, forced
    else:
        assert asked.code == 0, asked
    outcome = scene.run("run_credential_backfill", "--database", host.alias)
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("2 moved ")
    assert scene.run("run_secret_cleanup", "--database", host.alias, "--due").code in (0, 3)


@pytest.mark.parametrize("name", ["another directory", "an empty directory", "another key"])
def test_resolve_says_that_the_store_is_misconfigured(scene: Scene, name: str) -> None:
    """Never that there are no credentials, nor that they are lost."""
    happen, problem = MISHAPS[name]
    host = happen(scene)
    source = host.value("SELECT id FROM sources WHERE credential_ref IS NOT NULL LIMIT 1")
    with pytest.raises(StoreMisconfigured) as caught:
        resolve_credentials(tenant=TENANT, source_id=source, using=host.alias)
    assert isinstance(caught.value, BindingBroken)
    assert caught.value.problem is problem
    assert caught.value.code == "SOURCE_SECRET_STORE_MISCONFIGURED"
    assert not isinstance(caught.value, NoCredentials)


def test_what_can_be_read_is_read(scene: Scene) -> None:
    """A copy of a database may resolve: that puts nothing and erases nothing."""
    host = MISHAPS["a copy of the database"][0](scene)
    source = host.value("SELECT id FROM sources WHERE credential_ref IS NOT NULL LIMIT 1")
    assert resolve_credentials(tenant=TENANT, source_id=source, using=host.alias)["token"].startswith("made-up-")


def test_a_volume_that_comes_back_needs_no_person(scene: Scene) -> None:
    """An empty mount point is refused; with the volume in its place work goes on."""
    host = an_empty_directory(scene)
    assert scene.run("run_credential_backfill", "--database", host.alias).code == 1
    scene.directory.rmdir()
    (scene.scratch / "volume").rename(scene.directory)
    assert scene.run("run_credential_backfill", "--database", host.alias).out.startswith("2 moved ")
