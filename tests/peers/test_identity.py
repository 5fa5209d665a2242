"""Identities, allowlists and invitations: files that only their user reads, and lists that only the owner writes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from crew import RUN, allowlist, identities
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.peers.allowlist import AllowList
from phalanx.peers.identity import KEY_FILE, PeerIdentity, is_signed
from phalanx.peers.invitation import Invitation


def test_an_identity_is_kept_where_only_its_user_reads(tmp_path: Path) -> None:
    person = PeerIdentity.create("lab-3")
    person.save(tmp_path / "me")
    assert PeerIdentity.load(tmp_path / "me") == person
    assert stat.S_IMODE((tmp_path / "me").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "me" / KEY_FILE).stat().st_mode) == 0o600
    assert "PRIVATE" not in repr(person)
    with pytest.raises(UserError) as caught:
        person.save(tmp_path / "me")
    assert "holds a peer identity already" in str(caught.value)
    (tmp_path / "me" / KEY_FILE).chmod(0o644)
    with pytest.raises(UserError) as caught:
        PeerIdentity.load(tmp_path / "me")
    assert "other users of this machine can read the private key" in str(caught.value)


def test_a_key_and_a_certificate_of_two_peers_are_refused() -> None:
    one, other = identities(4)[:2]
    with pytest.raises(UserError) as caught:
        PeerIdentity.from_pem(one.key_pem, other.certificate_pem, where="x")
    assert "do not belong together" in str(caught.value)
    for key in ("", "x", one.certificate_pem):
        with pytest.raises(UserError):
            PeerIdentity.from_pem(key, one.certificate_pem, where="x")


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 64, "\x1b[2J", "-a"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        PeerIdentity.create(name)
    assert "is not a name for a peer" in str(caught.value)


def test_only_the_owner_changes_a_list_and_a_revoked_peer_does_not_return() -> None:
    owner, friend, other, _ = identities(4)
    first = AllowList.create(owner, "run", [friend.certificate_pem])
    second = first.add(owner, other.certificate_pem)
    third = second.revoke(owner, friend.id)
    assert second.replaces(first)
    assert not first.replaces(second)
    assert set(third.fingerprints()) == {owner.fingerprint, other.fingerprint}
    assert AllowList.from_json(json.loads(json.dumps(third.to_json())), where="x", owner=owner.fingerprint) == third
    assert third.revoked_names == ((friend.fingerprint, friend.name),)
    forgetful = AllowList.create(owner, "run").add(owner, other.certificate_pem).add(owner, friend.certificate_pem)
    forgetful = forgetful.add(owner, PeerIdentity.create("fifth").certificate_pem)
    assert forgetful.version > third.version
    assert not forgetful.replaces(third)  # it would let a revoked peer in again
    for change, text in [
        (lambda: first.add(friend, other.certificate_pem), "does not own this run"),
        (lambda: third.add(owner, friend.certificate_pem), "this certificate was revoked"),
        (lambda: third.revoke(owner, owner.id), "the owner of a run cannot be revoked"),
        (lambda: third.revoke(owner, "ffff"), "is nobody's fingerprint"),
    ]:
        with pytest.raises(UserError) as caught:
            change()
        assert text in str(caught.value)


def test_a_list_that_was_changed_or_is_of_another_owner_is_refused() -> None:
    owner, friend = identities(4)[:2]
    good = allowlist(4).to_json()
    for change, text in [
        ({"version": 99}, "changed after its owner signed it"),
        ({"run_id": "other"}, "changed after its owner signed it"),
        ({"certificates": good["certificates"][:1]}, "changed after its owner signed it"),
        ({"certificates": []}, "names nobody"),
        ({"certificates": good["certificates"][:1] * 2}, "somebody twice"),
        ({"revoked": [owner.fingerprint]}, "also revokes"),
        ({"revoked_names": {friend.fingerprint: "friend"}}, "names somebody who was not revoked"),
        ({"revoked_names": {friend.fingerprint: "../x"}}, "is not an allowlist"),
        ({"revoked_names": ["x"]}, "is not an allowlist"),
        ({"signature": "!"}, "is not an allowlist"),
        ({"version": True}, "is not an allowlist"),
        ({"certificates": ["x"]}, "is not an allowlist"),
    ]:
        with pytest.raises(UserError) as caught:
            AllowList.from_json({**good, **change}, where="list")
        assert text in str(caught.value), change
    with pytest.raises(UserError) as caught:
        AllowList.from_json(AllowList.create(friend, "trial").to_json(), where="list", owner=owner.fingerprint)
    assert "belongs to another owner" in str(caught.value)
    assert not is_signed(owner.certificate_pem, b"a", friend.sign(b"a"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_hostile_lists_and_invitations_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = allowlist(4).to_json()
    field = data.draw(st.sampled_from([*good, None]))
    value = data.draw(JSON)
    if field is None:
        hostile = value
    else:
        hostile = {**good, field: value}
        if value == good[field]:
            return
    with pytest.raises(UserError):
        AllowList.from_json(hostile, where="list")
    path = tmp_path_factory.mktemp("hostile") / "invitation.json"
    path.write_text(json.dumps({"kind": "phalanx peer invitation 1", "addresses": value, "allowed": hostile}))
    with pytest.raises(UserError):
        Invitation.load(path)


def test_an_invitation_is_a_file_that_brings_everything(tmp_path: Path) -> None:
    owner = identities(4)[0]
    invitation = Invitation.create(owner, allowlist(4), "new-peer", [("127.0.0.1", 4000)])
    path = tmp_path / "invitation.json"
    invitation.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = Invitation.load(path)
    assert found == invitation
    assert found.run_id == RUN.run_id
    assert found.identity.fingerprint in found.allowed.fingerprints()
    assert "PRIVATE" not in repr(found)
    data = json.loads(path.read_text())
    for change, text in [
        ({"kind": "x"}, "is not an invitation"),
        ({"addresses": [["h", 0]]}, "names no address"),
        ({"key": None}, "lacks the key"),
        ({"allowed": allowlist(4).to_json()}, "does not name the peer that it invites"),
        ({"allowed": {**data["allowed"], "version": 99}}, "changed after its owner signed it\n  ask the run's owner"),
    ]:
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(UserError) as caught:
            Invitation.load(path)
        assert text in str(caught.value)
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(UserError):
        Invitation.load(path)
    with pytest.raises(UserError) as caught:
        Invitation.load(tmp_path / "none.json")
    assert "there is no such invitation" in str(caught.value)
    assert "phalanx peers invite RUN NAME" in str(caught.value)
