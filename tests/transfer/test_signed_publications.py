"""Signed publications, attacked: what a key that is trusted has not signed reaches no copy, and no server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from exporter import api
from exporter.checkpoint import tensor_bundle
from exporter.checkpoint.tensor_bundle import Index, parse_index
from exporter.delta.row_hashes import BlockHasher, HashIndex, write_index
from exporter.errors import ExportError, ManifestError, NotTrusted, UsageError, VerificationError
from exporter.jobs import execute, runner
from exporter.options import EngineName, Jobs, Signing, Trusting
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.log_maintenance import merge, resume, rollback
from exporter.pipeline.rebase import rebase
from exporter.pipeline.tagging import set_tag
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import from_json
from exporter.publish.model import Model
from exporter.publish.signing import Signer, Trust, verify_digests
from exporter.publish.staging import Staging
from exporter.publish.tags import read_tags, resolve_position
from exporter.publish.versions import in_force, read_manifest, signer_of, trust_of
from exporter.transfer import items
from exporter.transfer.opened import name_of, opened
from exporter.transfer.pull import LocalCopy, pull
from exporter.verify.log import verify_model
from exporter.wire.crc32c import masked_crc
from tests.support.commands import export_model
from tests.support.key_pairs import key_pair
from tests.support.logs import Serving, assert_same_bits, publish_base, request, served_now, values_at
from tests.support.machines import Machine, files, grow_old, machine_in, pushed
from tests.support.object_stores import Bucket

LOG = f"deltas/{10:020d}"


def delta(start: int, end: int) -> str:
    return f"{LOG}/{start:020d}-{end:020d}"


class Keys:
    """Key pairs that openssl made, as people make them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def private(self, name: str, *kind: str) -> Path:
        return key_pair(self._directory, name, *kind)[0]

    def public(self, name: str, *kind: str) -> Path:
        return key_pair(self._directory, name, *kind)[1]

    def trust(self, *names: str, model: str = "ranker") -> Trust:
        return Trust.of([self.public(name) for name in names or ("publisher",)], model)

    def signer(self, name: str = "publisher", model: str = "ranker") -> Signer:
        return Signer.of(str(self.private(name)), model)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    (tmp_path / "keys").mkdir()
    return Keys(tmp_path / "keys")


def new_base(machine: Machine) -> None:
    machine.trainer.train()
    machine.trainer.step += 1
    machine.trainer.save()
    publish_base(machine.trainer, Serving(), machine.model)


class Attack:
    """A model in a store that its publisher signed, a reader's copy, and one who may write the store."""

    def __init__(self, machine: Machine, bucket: Bucket, url: str, keys: Keys, copy: Path) -> None:
        self.machine, self.bucket, self.url, self.keys, self.copy = machine, bucket, url, keys, copy

    def pull(self, *names: str, prune: bool = True) -> set[str]:
        """What a pull that trusts these keys left where it is, in words."""
        done = pull(self.url, self.copy, prune=prune, trust=self.keys.trust(*names))
        return {error.message for error in done.untrusted}

    def get(self, name: str) -> bytes:
        return self.bucket.keys("models/ranker/")[f"models/ranker/{name}"]

    def put(self, name: str, content: bytes) -> None:
        self.bucket.put(f"models/ranker/{name}", content)

    def move(self, old: str, new: str) -> None:
        for key, content in self.bucket.keys(f"models/ranker/{old}/").items():
            self.put(key.removeprefix("models/ranker/").replace(old, new, 1), content)

    def delete(self, path: str) -> None:
        for key in self.bucket.keys(f"models/ranker/{path}/"):
            self.bucket.delete(key)


@pytest.fixture
def attack(tmp_path: Path, bucket: Bucket, url: str, keys: Keys) -> Iterator[Attack]:
    model = tmp_path / "one" / "model"
    with in_force(model, keys.signer()):
        machine = machine_in(tmp_path / "one")
        pushed(machine.model, url)
        yield Attack(machine, bucket, url, keys, tmp_path / "copy")


def test_what_is_signed_is_taken(attack: Attack) -> None:
    assert attack.pull() == set()
    assert files(attack.copy) == files(attack.machine.model)
    manifest = read_manifest(attack.copy / delta(20, 30))
    assert manifest.signature is not None and manifest.signature.model == "ranker"
    assert all(file.sha256 for file in manifest.files)
    attack.machine.go_on(40)
    pushed(attack.machine.model, attack.url)
    merge(attack.machine.model)
    pushed(attack.machine.model, attack.url)
    assert attack.pull() == set()
    assert files(attack.copy) == files(attack.machine.model)


def test_signatures_cover_every_byte_of_a_manifest(attack: Attack) -> None:
    trust, content = attack.keys.trust(), attack.get(f"{delta(10, 20)}/manifest.json")
    trust.check(content, delta(10, 20), "it")
    for at in range(0, len(content), 7):
        altered = bytearray(content)
        altered[at] ^= 1
        with pytest.raises(NotTrusted):
            trust.check(bytes(altered), delta(10, 20), "it")
    for end in range(len(content) - 300, len(content)):
        with pytest.raises(NotTrusted):
            trust.check(content[:end], delta(10, 20), "it")
    for more in (b"\n", b" ", b"}", content[-200:]):
        with pytest.raises(NotTrusted):
            trust.check(content + more, delta(10, 20), "it")


def test_a_signature_is_for_one_place_and_one_model(attack: Attack) -> None:
    content = attack.get("10/manifest.json")
    with pytest.raises(NotTrusted, match="does not fit"):
        attack.keys.trust().check(content, "11", "it")
    with pytest.raises(NotTrusted, match="signed as a publication of 'ranker', expected 'other'") as refused:
        attack.keys.trust(model="other").check(content, "10", "it")
    assert "--signed-as ranker" in refused.value.hint
    renamed = content.replace(b'"signature": {"model":"ranker"', b'"signature": {"model":"other"')
    with pytest.raises(NotTrusted, match="does not fit"):
        attack.keys.trust(model="other").check(renamed, "10", "it")


def test_values_that_were_altered_in_the_store_never_reach_the_copy(attack: Attack) -> None:
    """Checksums that are no secret can be made to fit; the digests that were signed cannot."""
    name = f"{delta(20, 30)}/delta.data-00000-of-00001"
    whole = attack.get(name)
    attack.put(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(VerificationError):
        attack.pull()
    assert (attack.copy / delta(10, 20)).exists() and not (attack.copy / delta(20, 30)).exists()
    attack.put(name, whole)
    assert attack.pull() == set()
    assert files(attack.copy) == files(attack.machine.model)


def test_an_altered_file_whose_crc_is_made_to_fit_is_refused(attack: Attack, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    shutil.copytree(attack.machine.model / "10", staged)
    files_ = read_manifest(attack.machine.model / "10").files
    verify_digests(staged, files_)
    shard = next(staged.rglob("*.data-*"))
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(VerificationError, match="SHA-256"):
        verify_digests(staged, files_)


def another_publication(attack: Attack, tmp_path: Path, name: str | None = None) -> Machine:
    """What a thief publishes of a model: well made, unsigned or signed by a key that nobody trusts."""
    model = tmp_path / "thief" / "model"
    with in_force(model, None if name is None else attack.keys.signer(name)):
        return machine_in(tmp_path / "thief")


@pytest.mark.parametrize("key", [None, "thief"], ids=["unsigned", "by another key"])
def test_a_base_of_somebody_else_is_left(attack: Attack, tmp_path: Path, key: str | None) -> None:
    attack.pull()
    before = files(attack.copy)
    thief = another_publication(attack, tmp_path, key)
    for file in (thief.model / "10").rglob("*"):
        if file.is_file():
            attack.put(f"99/{file.relative_to(thief.model / '10').as_posix()}", file.read_bytes())
    (said,) = attack.pull()
    assert said.startswith(f"{attack.url}/99 is ") and ("not signed" in said or "not trusted" in said)
    assert files(attack.copy) == before
    attack.machine.go_on(40)
    for file in (path for path in (attack.machine.model / delta(30, 40)).iterdir() if path.is_file()):
        attack.put(f"{delta(30, 40)}/{file.name}", file.read_bytes())
    attack.pull()
    assert (attack.copy / delta(30, 40)).is_dir(), "readers follow the publisher, whatever else is there"


@pytest.mark.parametrize("new", ["11", "31", f"deltas/{11:020d}/{20:020d}-{30:020d}", delta(30, 40)])
def test_what_was_signed_elsewhere_is_left(attack: Attack, new: str) -> None:
    """Replayed under another number, in another log, as the next delta."""
    old = delta(20, 30) if new.startswith("deltas") else "10"
    attack.move(old, new)
    assert any(new in said and "does not fit" in said for said in attack.pull())
    assert files(attack.copy) == files(attack.machine.model)


def test_manifests_that_changed_places_are_left(attack: Attack) -> None:
    one, other = (attack.get(f"{path}/manifest.json") for path in (delta(10, 20), delta(20, 30)))
    attack.put(f"{delta(10, 20)}/manifest.json", other)
    attack.put(f"{delta(20, 30)}/manifest.json", one)
    assert len(attack.pull()) == 2
    assert not list(attack.copy.glob("deltas/*/*-*"))


def test_a_copy_never_goes_back(attack: Attack) -> None:
    """The store is set back to what was signed before: newer publications removed, an old hold put there."""
    old = dict(attack.bucket.keys("models/ranker/"))
    attack.machine.go_on(40)
    pushed(attack.machine.model, attack.url)
    attack.pull()
    before = files(attack.copy)
    grow_old(attack.copy)
    for key in attack.bucket.keys("models/ranker/"):
        attack.bucket.delete(key)
    for key, content in old.items():
        attack.bucket.put(key, content)
    attack.put(f"{LOG}/hold", b"20\n")
    (said,) = attack.pull()
    assert "hold says position 20" in said and files(attack.copy) == before
    attack.put(f"{LOG}/hold", b"not a position")
    (said,) = attack.pull()
    assert "no position" in said and files(attack.copy) == before
    attack.put(f"{LOG}/hold", b"40\n")
    assert attack.pull() == set()
    assert (attack.copy / LOG / "hold").read_bytes() == b"40\n", "a publisher may hold what there is"


def test_a_tag_leads_nobody_who_trusts_keys(attack: Attack, tmp_path: Path) -> None:
    """Nobody signs tags: a copy leaves those of the store, and where keys are trusted a tag names nothing."""
    tag = b'{"tags": {"prod": {"position": 20, "who": "a", "when": "2026-11-26T08:00:00Z"}}}'
    attack.put("tags.json", tag)
    assert attack.pull() == set()
    assert not (attack.copy / "tags.json").exists()
    set_tag(attack.copy, "own", 20)
    attack.put("tags.json", tag + b" ")
    assert attack.pull() == set()
    assert set(read_tags(attack.copy)) == {"own"}
    with in_force(attack.copy, trust=attack.keys.trust()):
        assert resolve_position("20", attack.copy) == 20
        assert resolve_position("@previous", attack.copy) == 20
        with pytest.raises(UsageError, match="nobody has signed that"):
            resolve_position("own", attack.copy)


def test_the_newest_base_stays_when_it_is_removed_from_the_store(attack: Attack) -> None:
    """Without keys, what is removed from a store is removed from copies: servers would go back."""
    new_base(attack.machine)
    pushed(attack.machine.model, attack.url)
    attack.pull()
    grow_old(attack.copy)
    newest = max(int(path.name) for path in attack.copy.iterdir() if path.name.isdecimal())
    attack.delete(str(newest))
    attack.pull()
    assert (attack.copy / str(newest)).is_dir()


def test_a_rollback_and_its_hold_come_signed(attack: Attack) -> None:
    attack.pull()
    rollback(attack.machine.model, 20, reason="scores fell")
    pushed(attack.machine.model, attack.url)
    assert attack.pull() == set()
    theirs, ours = files(attack.machine.model), files(attack.copy)
    assert theirs.pop(f"{LOG}/hold.json") != ours.pop(f"{LOG}/hold.json"), "which names the store"
    assert ours == theirs
    assert (attack.copy / LOG / "hold").read_bytes() == b"31\n"


def test_an_unsigned_log_is_refused(machine: Machine, url: str, keys: Keys, tmp_path: Path) -> None:
    """The downgrade of all: everything signed is taken away, and a model without signatures put there."""
    pushed(machine.model, url)
    with pytest.raises(NotTrusted, match="is not signed"):
        pull(url, tmp_path / "copy", trust=keys.trust())
    assert not (tmp_path / "copy").exists()
    pull(url, tmp_path / "old")
    with in_force(machine.model, keys.signer()):
        new_base(machine)
        pushed(machine.model, url)
    done = pull(url, tmp_path / "old", trust=keys.trust())
    assert len(done.fetched) == 1 and done.fetched[0].isdecimal(), "servers leave for it what was here"
    assert done.untrusted == ()
    with in_force(machine.model, unsigned=True):
        machine.go_on(40)
    pushed(machine.model, url)
    pull(url, tmp_path / "other")
    with pytest.raises(NotTrusted, match="is not signed") as refused:
        pull(url, tmp_path / "other", trust=keys.trust())
    assert "here before" in refused.value.cause


def test_trust_begins_at_the_first_base_that_is_signed(
    machine: Machine, url: str, keys: Keys, tmp_path: Path
) -> None:
    """What was published before signing was begun is left, and is nothing to be told of."""
    with in_force(machine.model, keys.signer()):
        new_base(machine)
        machine.go_on(40)
    pushed(machine.model, url, trust=keys.trust())
    done = pull(url, tmp_path / "copy", trust=keys.trust())
    assert done.untrusted == () and "10" not in done.fetched and done.position == 40
    with in_force(machine.model, trust=keys.trust()):
        assert verify_model(machine.model).problems == ()
    with in_force(machine.model, unsigned=True):
        machine.go_on(50)
    with in_force(machine.model, trust=keys.trust()):
        assert [type(problem) for problem in verify_model(machine.model).problems][:1] == [NotTrusted]
    with pytest.raises(NotTrusted):
        pushed(machine.model, url, trust=keys.trust())


def test_keys_are_changed_without_a_stop_and_revoked(attack: Attack, tmp_path: Path) -> None:
    """A file of keys is read again at each look: first both, then the new one alone."""
    file = tmp_path / "trusted.pem"
    file.write_bytes(attack.keys.public("publisher").read_bytes())
    copy = LocalCopy(attack.url, attack.copy, trust=Trust.of([file], "ranker"))
    assert copy.update().position == 30
    with in_force(attack.machine.model, attack.keys.signer("next")):
        attack.machine.go_on(40)
        pushed(attack.machine.model, attack.url)
    assert copy.update().position == 30 and copy.update().untrusted
    both = [attack.keys.public(name).read_bytes() for name in ("publisher", "next")]
    file.write_bytes(b"".join(both))
    assert copy.update().position == 40
    file.write_bytes(both[1][:30])
    with pytest.raises(NotTrusted, match="no public key"):
        copy.update()  # it is being written: a watch goes on, and takes nothing
    file.write_bytes(both[1])
    with pytest.raises(NotTrusted):
        copy.update()
    with in_force(attack.machine.model, attack.keys.signer("next")):
        new_base(attack.machine)
        pushed(attack.machine.model, attack.url)
    (base,) = copy.update().fetched
    assert int(base) > 40, "it leaves all behind that the old key signed"


def test_models_whose_deltas_others_wrote_are_followed_to_the_last_trusted_one(
    attack: Attack, tmp_path: Path
) -> None:
    """Where servers list a directory that others write, they are sent no further than before that."""
    model, thief = attack.machine.model, another_publication(attack, tmp_path)
    with in_force(model, trust=attack.keys.trust()):
        assert next(iter(Model.read(model).logs.values())).newest == 30
        shutil.copytree(thief.model / delta(20, 30), model / delta(10, 30))
        found = Model.read(model)
        assert next(iter(found.logs.values())).newest == 20
        assert str(model / delta(10, 30)) in found.untrusted[0].message


@pytest.mark.parametrize("lost", ["manifest.json", "delta.index"])
def test_deltas_that_are_not_whole_are_not_followed(attack: Attack, lost: str) -> None:
    """A server's graph lists directories: it would take one that has no manifest."""
    model, path = attack.machine.model, delta(20, 30)
    if lost == "manifest.json":
        path = delta(10, 30)
        shutil.copytree(model / delta(20, 30), model / path)
    (model / path / lost).unlink()
    with in_force(model, trust=attack.keys.trust()):
        found = Model.read(model)
        assert next(iter(found.logs.values())).newest == 20
        assert str(model / path) in found.untrusted[0].message


def test_deltas_whose_bytes_were_altered_are_not_followed(attack: Attack) -> None:
    shard = attack.machine.model / delta(20, 30) / "delta.data-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with in_force(attack.machine.model, trust=attack.keys.trust()):
        found = Model.read(attack.machine.model)
    assert next(iter(found.logs.values())).newest == 20 and "SHA-256" in found.untrusted[0].message


def test_verify_and_doctor_name_what_nobody_trusted_signed(attack: Attack) -> None:
    model, key = attack.machine.model, attack.keys.public("publisher")
    options = ("--trust", key, "--signed-as", "ranker")
    assert export_model("verify", model, *options).code == 0
    assert export_model("doctor", model, *options).code == 0
    (model / "10" / "assets.extra").mkdir(exist_ok=True)
    extra = model / "10" / "assets.extra" / "tf_serving_warmup_requests.more"
    extra.write_bytes(b"")
    assert "does not list" in export_model("verify", model, *options).err
    extra.unlink()
    manifest = model / delta(10, 20) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 20', b'"step": 21'))
    for name in ("verify", "doctor"):
        done = export_model(name, model, *options)
        assert done.code == 6 and "signature" in done.err + done.out


def test_verify_of_a_base_that_nobody_signed_says_no_more_than_it_knows(machine: Machine, keys: Keys) -> None:
    trust = ("--trust", str(keys.public("publisher")))
    for command in ("verify", "doctor"):
        ran = export_model(command, machine.model, *trust)
        assert ran.code == 6
        assert "is not signed" in ran.err
        assert "takes no deltas" not in ran.out
    said = [line.split() for line in export_model("verify", machine.model, *trust).out.splitlines()]
    assert ["position", "unknown"] in said
    assert ["problems", "1"] in said


def test_keys_of_other_kinds_and_shapes_are_refused(keys: Keys, tmp_path: Path) -> None:
    for name, kind in (("rsa", "RSA"), ("x", "X25519")):
        with pytest.raises(UsageError, match="not an Ed25519 key"):
            Signer.of(str(keys.private(name, kind)), "ranker")
        with pytest.raises(UsageError, match="not Ed25519"):
            Trust.of([keys.public(name, kind)], "ranker")
    secret = keys.private("publisher")
    with pytest.raises(UsageError, match="which readers must not have") as refused:
        Trust.of([secret], "ranker")
    assert f"-in {secret} -pubout -out {secret}.pem" in refused.value.hint, "the secret is not overwritten"
    readable = keys.public("readable")
    readable.chmod(0o644)
    with pytest.raises(UsageError, match="holds no private key"):  # and not: its mode lets others read it
        Signer.of(str(readable), "ranker")
    for content in (b"", b"no key\n", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"):
        (tmp_path / "bad").write_bytes(content)
        (tmp_path / "bad").chmod(0o600)
        with pytest.raises(UsageError):
            Trust.of([tmp_path / "bad"], "ranker")
        with pytest.raises(UsageError, match="no private key"):
            Signer.of(str(tmp_path / "bad"), "ranker")
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "giant").chmod(0o600)
    with pytest.raises(UsageError, match="cannot be read"):
        Signer.of(str(tmp_path / "giant"), "ranker")
    with pytest.raises(UsageError, match="cannot be read"):
        Trust.of([tmp_path / "giant"], "ranker")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="cannot be read"):
        Trust.of([tmp_path / "fifo"], "ranker")


def test_private_keys_are_kept_private(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, attack: Attack, tmp_path: Path
) -> None:
    path = keys.private("publisher")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="mode 0644") as refused:
        Signer.of(str(path), "ranker")
    assert "chmod 600" in refused.value.hint
    path.chmod(0o600)
    secret = path.read_text().splitlines()[1]
    monkeypatch.setenv("SIGNING", path.read_text())
    assert Signer.of("env:SIGNING", "ranker").key_id == keys.signer().key_id
    assert secret not in repr(Signer.of("env:SIGNING", "ranker"))
    with pytest.raises(UsageError, match="was given a key itself") as refused:
        Signer.of(path.read_text(), "ranker")
    assert secret not in f"{refused.value.message}{refused.value.cause}{refused.value.hint}"
    with pytest.raises(UsageError, match="no such variable"):
        Signer.of("env:ABSENT", "ranker")
    assert not any(secret.encode() in content for content in files(attack.machine.model).values())


def test_nothing_is_signed_unless_asked_for(machine: Machine) -> None:
    manifest = (machine.model / "10" / "manifest.json").read_text()
    assert "sha256" not in manifest.partition('"files"')[2] and "signature" not in manifest
    assert from_json(manifest).signature is None


def test_a_signed_manifest_says_the_digest_of_each_file(attack: Attack) -> None:
    content = json.loads(attack.get("10/manifest.json"))
    del content["files"][0]["sha256"]
    with pytest.raises(ManifestError, match="damaged") as refused:
        from_json(json.dumps(content))
    assert "no sha256" in refused.value.cause


def test_a_model_that_is_opened_by_its_url_is_signed_under_its_name(attack: Attack, url: str) -> None:
    key = Signing(str(attack.keys.private("publisher")))
    with opened(url, signing=key) as target:
        target.carry(lambda: rollback(target.path, 20))
    assert attack.pull() == set()
    assert Model.read(attack.copy).hold == 31
    with opened(url, read_only=True, trusting=Trusting((attack.keys.public("publisher"),))) as target:
        assert target.carry(lambda: verify_model(target.path, bytes_=True)).problems == ()
    with opened(url, read_only=True, trusting=Trusting((attack.keys.public("thief"),))) as target:
        assert {type(one) for one in target.carry(lambda: verify_model(target.path)).problems} == {NotTrusted}


def test_a_rollback_of_long_ago_that_is_put_back_holds_nobody(attack: Attack) -> None:
    """It was signed, and its hold with it; the log has gone on since."""
    rollback(attack.machine.model, 20)
    pushed(attack.machine.model, attack.url)
    (path,) = (path for path in (attack.machine.model / LOG).glob("*-*31"))
    old = dict(attack.bucket.keys(f"models/ranker/{LOG}/{path.name}/"))
    assert old
    resume(attack.machine.model)
    attack.machine.go_on(40)
    pushed(attack.machine.model, attack.url)
    for key in old:
        attack.bucket.delete(key)
    attack.pull()
    assert not (attack.copy / LOG / path.name).exists() and Model.read(attack.copy).hold is None
    for key, content in old.items():
        attack.bucket.put(key, content)
    attack.put(f"{LOG}/hold", b"31\n")
    assert len(attack.pull()) == 1
    assert (attack.copy / LOG / path.name).exists() and Model.read(attack.copy).hold is None


def test_forgeries_in_a_store_are_not_signed_on(attack: Attack, tmp_path: Path, url: str) -> None:
    """Who merges, rolls back or exports to a store signs nothing that was made of what a thief put there."""
    key = Signing(str(attack.keys.private("publisher")))
    thief = another_publication(attack, tmp_path)
    thief.go_on(40)
    for file in (path for path in (thief.model / delta(30, 40)).iterdir() if path.is_file()):
        attack.put(f"{delta(30, 40)}/{file.name}", file.read_bytes())
    works: tuple[Callable[[Path], object], ...] = (merge, lambda path: rollback(path, 20))
    for work in works:
        with pytest.raises(NotTrusted), opened(url, signing=key) as target:
            target.carry(partial(work, target.path))
    attack.delete(delta(30, 40))
    name = f"{delta(20, 30)}/delta.data-00000-of-00001"
    whole = attack.get(name)
    attack.put(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ExportError), opened(url, signing=key) as target:
        target.carry(partial(merge, target.path))
    attack.put(name, whole)
    with opened(url, signing=key) as target:
        assert target.carry(partial(merge, target.path)) is not None
    assert attack.pull() == set()
    back, next_key = partial(rollback, to=20), str(attack.keys.private("next"))
    with pytest.raises(NotTrusted), opened(url, signing=Signing(next_key)) as target:
        target.carry(partial(back, target.path))
    both = Signing(next_key, trust=(attack.keys.public("publisher"),))
    with opened(url, signing=both) as target:
        target.carry(partial(back, target.path))
    assert attack.pull("publisher", "next") == set()


def full_checkpoint(attack: Attack, step: int) -> None:
    """The trainer goes on without increments: the next delta comes of a comparison."""
    trainer = attack.machine.trainer
    trainer.train()
    trainer.step, trainer.touched, trainer.parent = step, {}, None
    trainer.save()


def with_the_same_crc(content: bytes, at: int) -> bytes:
    """Other bytes with the same CRC-32C: the difference is the polynomial itself."""
    bits = sum((0x11EDC6F41 >> (32 - power) & 1) << power for power in range(33)).to_bytes(5, "little")
    changed = bytes(a ^ b for a, b in zip(content[at : at + 5], bits, strict=True))
    return content[:at] + changed + content[at + 5 :]


@pytest.mark.parametrize("name", [f"{delta(20, 30)}/delta.index", "10/variables/variables.index"])
def test_digests_come_first(
    name: str, attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command that trusts keys makes anything of an index that was not signed, whatever its checksum."""
    seen: list[bytes] = []

    def noted(data: bytes, path: Path) -> Index:
        seen.append(data)
        return parse_index(data, path)

    for module in (tensor_bundle, items):
        monkeypatch.setattr(module, "parse_index", noted)
    whole = (attack.machine.model / name).read_bytes()
    altered = with_the_same_crc(whole, len(whole) // 2)
    attack.put(name, altered)
    with pytest.raises(VerificationError, match="SHA-256"):
        pull(attack.url, tmp_path / "new", trust=attack.keys.trust())
    (attack.machine.model / name).write_bytes(altered)
    key = ("--trust", attack.keys.public("publisher"), "--signed-as", "ranker")
    for command in ("verify", "doctor"):
        assert export_model(command, attack.machine.model, *key).code == 6
    attack.machine.trainer.train()
    attack.machine.trainer.save()
    with in_force(attack.machine.model, trust=attack.keys.trust()), pytest.raises(ExportError):
        export_incremental(request(attack.machine.trainer, attack.machine.model))
    assert seen and altered not in seen


def test_caches_in_a_store_are_not_believed(attack: Attack, url: str) -> None:
    """Hashes that say a table is published as it is trained: the delta would lack its rows, signed."""
    key = Signing(str(attack.keys.private("publisher")))
    full_checkpoint(attack, 40)
    log, now = read_log(attack.machine.model), served_now(attack.machine.trainer, Serving())
    hasher = BlockHasher.fresh()
    tables = {each.name: hasher.hash_rows(now[each.name]) for each in log.schema.variables if each.is_table}
    forged = HashIndex(log.lineage, 30, hasher, tables, log.newest.manifest.state_id)
    (attack.copy.parent / "forged").mkdir()
    write_index(attack.copy.parent / "forged" / "hashes", forged)
    attack.put(f"{LOG}/.state/hashes", (attack.copy.parent / "forged" / "hashes").read_bytes())
    attack.put(f"{LOG}/.state/held-back-30-forged.index", b"")
    with opened(url, signing=key) as target:
        shown = [*target.path.rglob(".state/*")]
        at = partial(request, attack.machine.trainer, target.path)
        target.carry(lambda: export_incremental(at()))
        assert attack.pull() == set()
        assert_same_bits(values_at(read_log(attack.copy)), served_now(attack.machine.trainer, Serving()))
        full_checkpoint(attack, 50)
        target.carry(lambda: export_incremental(at()))
        assert [path.name for path in target.path.rglob(".state/hashes")] == ["hashes"], "a watch has its own"
    assert not shown
    assert attack.pull() == set()
    assert_same_bits(values_at(read_log(attack.copy)), served_now(attack.machine.trainer, Serving()))


def test_a_base_that_was_altered_in_the_store_is_not_compared_with(attack: Attack, url: str) -> None:
    """Its checksums fit, as such checksums can be made to: what equals the forgery would not be published."""
    (name,) = (path.relative_to(attack.machine.model) for path in attack.machine.model.glob("10/*/*.data-*"))
    whole = attack.get(name.as_posix())
    altered = with_the_same_crc(whole, 0)
    assert altered != whole and masked_crc(altered) == masked_crc(whole)
    attack.put(name.as_posix(), altered)
    full_checkpoint(attack, 40)
    key = Signing(str(attack.keys.private("publisher")))
    with pytest.raises(VerificationError, match="SHA-256"), opened(url, signing=key) as target:
        target.carry(lambda: export_incremental(request(attack.machine.trainer, target.path)))


def test_a_new_base_holds_nothing_that_the_old_one_does_not_list(attack: Attack, url: str) -> None:
    """Servers run requests of `assets.extra`; signed they would be, if they were copied."""
    attack.put("10/assets.extra/tf_serving_warmup_requests", b"forged")
    based = api.rebase(url, signing=Signing(str(attack.keys.private("publisher"))))
    assert based is not None
    assert not [file for file in based.published.manifest.files if "warmup" in file.path]
    assert attack.pull() == set()
    assert not [*attack.copy.rglob("*warmup*")]


def test_work_that_others_may_have_left_is_not_gone_on_with(
    attack: Attack, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts lie in the store, and nobody signs them: values of a forged one would be signed."""

    def looked(directory: object, name: str) -> None:
        raise AssertionError(f"{name} is asked for")

    monkeypatch.setattr(execute, "kept_receipt", looked)
    monkeypatch.setattr(runner, "kept_receipt", looked)
    key = Signing(str(attack.keys.private("publisher")))
    based = api.rebase(url, signing=key, jobs=Jobs(engine=EngineName.LOCAL))
    assert based is not None and based.tasks
    assert attack.pull() == set()
    assert_same_bits(values_at(read_log(attack.copy)), served_now(attack.machine.trainer, Serving()))


def test_a_hold_may_come_back_to_where_the_copy_is(attack: Attack) -> None:
    """It was beyond what there is: no server has passed it."""
    attack.pull()
    for position in (50, 40, 30):
        attack.put(f"{LOG}/hold", f"{position}\n".encode())
        assert attack.pull() == set()
        assert Model.read(attack.copy).hold == position
    attack.put(f"{LOG}/hold", b"29\n")
    assert len(attack.pull()) == 1 and Model.read(attack.copy).hold == 30


def test_keys_of_blocks_that_overlap_stay_in_force(tmp_path: Path, keys: Keys) -> None:
    """Threads open one model: the first that is done does not take the keys of the others with it."""
    signer, trust = keys.signer(), keys.trust()
    first, second = in_force(tmp_path, signer, trust), in_force(tmp_path, signer, trust)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signer_of(tmp_path) is signer and trust_of(tmp_path / "1") == (trust, "1")
    with in_force(tmp_path):
        assert signer_of(tmp_path) is signer, "who has no key takes none away"
    second.__exit__(None, None, None)
    assert signer_of(tmp_path) is None and trust_of(tmp_path / "1") is None


def test_a_model_that_is_signed_goes_on_signed(attack: Attack, url: str) -> None:
    """Without a key its readers would leave all that follows, and nobody would have meant it."""
    model = attack.machine.model.parent / "elsewhere" / "ranker"
    attack.pull()
    shutil.copytree(attack.copy, model)
    full_checkpoint(attack, 40)
    works: tuple[Callable[[Path], object], ...] = (
        merge,
        rebase,
        lambda path: rollback(path, 20),
        lambda path: export_incremental(request(attack.machine.trainer, path)),
        lambda path: publish_base(attack.machine.trainer, Serving(), path),
    )
    before = files(model)
    for work in works:
        with pytest.raises(UsageError, match="is signed, and no key is named") as refused:
            work(model)
        assert "--sign-key FILE" in refused.value.hint and "--unsigned" in refused.value.hint
        assert files(model) == before
    with pytest.raises(UsageError, match="is signed"), opened(url) as target:
        target.carry(partial(merge, target.path))
    refusal = export_model("rollback", model, "--to", 20, "--json")
    assert refusal.code == 2 and "--unsigned" in refusal.error["hint"]
    key = attack.keys.private("publisher")
    assert export_model("rollback", model, "--to", 20, "--unsigned", "--sign-key", key).code == 2
    assert export_model("rollback", model, "--to", 20, "--unsigned").code == 0
    assert export_model("resume", model, "--lift-only").code == 0, "it publishes nothing"


def test_a_model_has_the_name_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranker" / "10").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "ranker" / "10")
    assert {name_of(path) for path in ("..", tmp_path / "ranker" / ".", "s3://b/models/ranker")} == {"ranker"}


def test_a_canary_of_the_copy_decides_beside_signatures(attack: Attack) -> None:
    """Its rollback is the copy's own: no key signed it, and the copy goes on with what leads on from it."""
    attack.pull()
    log = read_log(attack.copy)
    with Staging(attack.copy) as staging:
        log.hold.put(20, staging, canary=True)
    rollback(attack.copy, 20, if_canary=True)
    assert attack.pull() == set()
    attack.machine.go_on(40)
    merge(attack.machine.model)
    pushed(attack.machine.model, attack.url)
    assert attack.pull() == set()
    assert (attack.copy / delta(10, 40)).exists()


def test_nothing_in_the_bucket_moves_what_a_canary_of_the_copy_has_approved(attack: Attack) -> None:
    """A hold is not signed: one far beyond would free what no canary has judged."""
    attack.pull()
    with Staging(attack.copy) as staging:
        read_log(attack.copy).hold.put(20, staging, canary=True)
    attack.put(f"{LOG}/hold", f"{10**17}\n".encode())
    assert attack.pull() == set()
    log = read_log(attack.copy)
    assert (log.approved, log.hold.path.read_text()) == (20, "20\n")
    attack.delete(f"{LOG}/hold")
    assert attack.pull() == set()
    assert read_log(attack.copy).approved == 20
