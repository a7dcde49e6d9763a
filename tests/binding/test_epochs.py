"""The epoch: one worker at a time advances it, in the database first, and whoever is cut short is caught up with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kfs_credentials import binding
from kfs_credentials.binding import Known, Watch, advance, check_bound, known
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.crypto import Scope, new_ref
from kfs_credentials.errors import BindingBroken, BindingProblem, LeaseLost, StoreUnavailable
from kfs_credentials.models import Binding
from kfs_credentials.stores.calls import Call
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.values import Probe
from tests.backfill.runs import execute
from tests.cleanup.rows import add_secret
from tests.cleanup.runs import claim
from tests.cleanup.workers import new_worker

pytestmark = pytest.mark.django_db(transaction=True)

SCOPE = Scope("tenant", "space", "source")


def epochs(store: EncryptedStore) -> tuple[int, int]:
    """Return the epoch of the database and that of the store."""
    seen = store.read_probe()
    assert isinstance(seen, Probe)
    return Binding.objects.get().epoch, seen.epoch


def test_both_sides_advance(store: EncryptedStore) -> None:
    assert epochs(store) == (0, 0)
    watch = advance("default", "default", worker="tests")
    assert epochs(store) == (1, 1)
    assert (watch.half.epoch, watch.epoch) == (1, 1)
    assert Binding.objects.get().lease_token is None


def test_each_batch_of_erasures_begins_one(store: EncryptedStore) -> None:
    for _ in range(3):
        add_secret(store, None, "retired, due")
    new_worker(batch_size=1, due_only=True).run()
    assert epochs(store) == (3, 3)


def test_a_batch_that_erases_nothing_begins_none(store: EncryptedStore) -> None:
    new_worker(due_only=True).run()
    assert epochs(store) == (0, 0)


def test_cut_short_between_the_halves(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is one epoch behind: that is allowed, and the next advance catches up before it goes on."""

    def killed(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store, "start_replace_probe", killed)
        with pytest.raises(StoreUnavailable):
            advance("default", "default", worker="tests")
    assert epochs(store) == (1, 0)
    check_bound("default", "default")
    written: list[int] = []
    real = store.start_replace_probe

    def noted(probe: Probe, **options: Any) -> Call[None]:
        written.append(probe.epoch)
        assert Binding.objects.get().epoch == probe.epoch  # the database first
        return real(probe, **options)

    monkeypatch.setattr(store, "start_replace_probe", noted)
    advance("default", "default", worker="tests")
    assert written == [1, 2]
    assert epochs(store) == (2, 2)


def test_never_two_behind(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is cut short, the store never shows an epoch that is older than the one before."""

    def killed(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("killed")

    monkeypatch.setattr(store, "start_replace_probe", killed)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            advance("default", "default", worker="tests")
    assert epochs(store) == (1, 0)


def test_whoever_has_the_lease_is_waited_for(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(
        "UPDATE kfs_credentials_binding SET worker_id = 'other#1', lease_token = gen_random_uuid(), "
        "lease_expires_at = now() + interval '1 hour'"
    )
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            execute("UPDATE kfs_credentials_binding SET worker_id = NULL, lease_token = NULL, lease_expires_at = NULL")

    monkeypatch.setattr("time.sleep", pause)
    advance("default", "default", worker="tests")
    assert len(pauses) == 3
    assert epochs(store) == (1, 1)


def test_a_lease_that_is_never_given_back(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gives up for now, as for a store that is unavailable."""
    execute(
        "UPDATE kfs_credentials_binding SET worker_id = 'other#1', lease_token = gen_random_uuid(), "
        "lease_expires_at = now() + interval '1 hour'"
    )
    monkeypatch.setattr(binding, "ADVANCING", -10.0)
    with pytest.raises(StoreUnavailable, match="other workers advance the epoch"):
        advance("default", "default", worker="tests")
    assert epochs(store) == (0, 0)


def test_what_it_could_not_give_back_is_its_own(store: EncryptedStore) -> None:
    """The database was gone when the lease was to be given back: the same worker need not wait for its end."""
    execute(
        "UPDATE kfs_credentials_binding SET worker_id = 'tests#1', lease_token = gen_random_uuid(), "
        "lease_expires_at = now() + interval '1 hour'"
    )
    advance("default", "default", worker="tests")
    assert epochs(store) == (1, 1)


def test_a_frozen_worker_writes_no_old_epoch(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up when others have gone on: the store's newer probe stays."""
    real = store.start_replace_probe

    def frozen(probe: Probe, *, guard: Callable[[], None]) -> Call[None]:
        monkeypatch.setattr(store, "start_replace_probe", real)
        execute("UPDATE kfs_credentials_binding SET lease_expires_at = now() - interval '1 s'")
        advance("default", "default", worker="another")
        advance("default", "default", worker="another")

        def lost() -> None:
            raise LeaseLost("by its own watch")

        return real(probe, guard=lost)

    monkeypatch.setattr(store, "start_replace_probe", frozen)
    with pytest.raises(StoreUnavailable, match="did not take a new epoch within 10 s"):
        advance("default", "default", worker="tests")
    assert epochs(store) == (3, 3)


def test_many_at_once(store: EncryptedStore) -> None:
    """Each advance is one epoch, and nobody takes the others for a restored copy."""
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(10):
                advance("default", "default", worker=name).end()
                check_bound("default", "default")
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            failures.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=(f"worker-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert epochs(store) == (40, 40)


def test_the_store_goes_away_in_the_middle_of_a_put(
    store: EncryptedStore, secrets_directory: Path, tmp_path: Path
) -> None:
    """What is put goes where the probe was seen, and is used only if it is there too that it can be read."""
    watch = check_bound("default", "default")
    seen: list[Any] = []

    def look(sighting: Any) -> None:
        seen.append(sighting)
        watch.look(sighting)
        if len(seen) == 1:
            secrets_directory.rename(tmp_path / "volume")
            secrets_directory.mkdir()

    with pytest.raises(BindingBroken) as caught:
        store.put(SCOPE, new_ref(), {"token": "made-up"}, look=look)
    assert caught.value.problem is BindingProblem.NO_PROBE
    # Put through the handle of the directory that was there at first, wherever its path leads by now; then read back.
    assert [type(one) for one in seen] == [Probe, Probe, type(None)]
    assert len(list((tmp_path / "volume").rglob("*.enc"))) == 1
    assert list(secrets_directory.rglob("*")) == []
    with pytest.raises(BindingBroken) as caught:
        store.put(SCOPE, new_ref(), {"token": "made-up"}, look=watch.look)
    assert caught.value.problem is BindingProblem.NO_PROBE
    assert not [path for path in secrets_directory.rglob("*") if path.is_file()]


def test_nothing_is_gone_where_there_is_no_probe(
    store: EncryptedStore, secrets_directory: Path, tmp_path: Path
) -> None:
    """An empty directory in the place of the store, in the middle of a run: "already absent" is not believed."""
    add_secret(store, None, "retired, due")
    steps = Cleanup(using="default", worker="tests", lease=60.0)
    erasure = claim(steps)
    assert steps.start_delete(erasure)
    steps.finish_delete(erasure)
    steps.release(erasure)

    add_secret(store, None, "retired, due")
    erasure = claim(steps)
    secrets_directory.rename(tmp_path / "volume")
    secrets_directory.mkdir()
    with pytest.raises(BindingBroken) as caught:
        steps.start_delete(erasure)
    assert caught.value.problem is BindingProblem.NO_PROBE


def test_a_database_that_is_bound_anew_meanwhile(store: EncryptedStore) -> None:
    """What was put for the old binding is not used."""
    watch = check_bound("default", "default")
    binding.bind("default", "default", by="tests")
    with pytest.raises(BindingBroken) as caught:
        watch.end()
    assert caught.value.problem is BindingProblem.OTHER


def test_a_database_that_is_restored_meanwhile(store: EncryptedStore) -> None:
    for _ in range(2):
        advance("default", "default", worker="tests")
    watch = check_bound("default", "default")
    execute("UPDATE kfs_credentials_binding SET epoch = 1")
    with pytest.raises(BindingBroken) as caught:
        watch.end()
    assert caught.value.problem is BindingProblem.OLD_DATABASE
    with pytest.raises(BindingBroken):
        advance("default", "default", worker="tests")
    assert epochs(store) == (1, 2)


def test_many_epochs_begin_while_one_looks(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was looked at a moment ago is not taken for a restored one."""
    real = Watch.begin
    begun: list[int] = []

    def begin(using: str, alias: str) -> Watch:
        if not begun:
            begun.append(1)
            for _ in range(3):
                advance("default", "default", worker="another")
        return real(using, alias)

    monkeypatch.setattr(Watch, "begin", begin)
    assert check_bound("default", "default").epoch == 3
    half = known("default", "default")
    assert isinstance(half, Known)
    assert half.epoch == 3
