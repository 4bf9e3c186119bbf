"""Whose model: two models of one name and one key, and which of them a copy takes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter import api
from exporter.errors import NotTrusted
from exporter.options import Signing
from exporter.pipeline.log_maintenance import rollback
from exporter.pipeline.rebase import rebase
from exporter.publish.manifest import from_json, to_json
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import identities_of, in_force, pinned_identity, read_manifest, version_dirs
from exporter.transfer.opened import opened
from exporter.transfer.pull import LocalCopy
from tests.support.commands import Ran, export_model
from tests.support.key_pairs import key_pair
from tests.support.logs import Serving, publish_base
from tests.support.machines import Machine, machine_in, pushed
from tests.support.object_stores import Bucket
from tests.support.step_models import MODEL, save

LOG = f"deltas/{10:020d}"


class World:
    """`staging/ranker` and `prod/ranker` in one bucket, signed by one key; a copy of the second."""

    def __init__(self, directory: Path, bucket: Bucket, stack: ExitStack) -> None:
        self.directory, self.bucket = directory, bucket
        self.private, self.public = key_pair(directory)
        self.machines: dict[str, Machine] = {}
        for name in ("staging", "prod"):
            signer = Signer.of(str(self.private), "ranker")
            stack.enter_context(in_force(directory / name / "model", signer))
            self.machines[name] = machine_in(directory / name)
            self.push(name)
        self.copy = directory / "copy"

    def url(self, name: str) -> str:
        return self.bucket.url(f"{name}/ranker")

    def push(self, name: str) -> None:
        pushed(self.machines[name].model, self.url(name))

    def identity(self, name: str) -> str:
        (found,) = identities_of(version_dirs(self.machines[name].model))
        return found

    def pull(self, *options: object, name: str = "prod") -> Ran:
        return export_model("pull", self.url(name), self.copy, "--trust", self.public, *options)

    def new_base(self, name: str) -> int:
        """The trainer saves again, and a new log begins; its number."""
        machine = self.machines[name]
        machine.trainer.train()
        machine.trainer.step += 10
        machine.trainer.save()
        return publish_base(machine.trainer, Serving(dense=frozenset({"items"})), machine.model).version

    def steal(self, path: str) -> None:
        """Copy a publication of staging's to the same place in prod."""
        for key, content in self.bucket.keys(f"staging/ranker/{path}/").items():
            self.bucket.put(key.replace("staging/", "prod/", 1), content)


@pytest.fixture
def world(tmp_path: Path, bucket: Bucket) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, bucket, stack)


def test_every_publication_of_a_model_carries_the_identity_of_its_first(world: World) -> None:
    machine, identity = world.machines["prod"], world.identity("prod")
    assert identity != world.identity("staging")
    machine.go_on(40)
    rebase(machine.model)
    rollback(machine.model, 20)
    manifests = [*machine.model.glob("*/manifest.json"), *machine.model.glob("deltas/*/*/manifest.json")]
    assert len(manifests) == 6
    assert {read_manifest(path.parent).identity for path in manifests} == {identity}


def test_what_is_signed_for_staging_is_not_taken_at_prod(world: World) -> None:
    first = world.pull("--json")
    assert first.document["identity"] == world.identity("prod") == pinned_identity(world.copy)
    assert "takes no other" not in world.pull().out
    number = world.new_base("staging")
    world.push("staging")
    world.steal(str(number))
    refused = world.pull("--json")
    assert (refused.code, refused.error["error"]) == (6, "NotTrusted")
    assert f"of another model 'ranker': {world.identity('staging')}" in refused.error["message"]
    assert not (world.copy / str(number)).exists()
    world.machines["prod"].go_on(50)
    world.push("prod")
    assert world.pull().code == 6
    assert (world.copy / LOG / f"{30:020d}-{50:020d}").exists(), "what is signed for prod goes on"
    verified = export_model("verify", world.copy, "--trust", world.public, "--signed-as", "ranker")
    assert (verified.code, world.identity("prod") in verified.out) == (0, True)


def test_a_pin_that_cannot_be_read_is_not_made_anew(world: World) -> None:
    world.pull()
    pin, content = world.copy / ".identity", (world.copy / ".identity").read_bytes()
    for damage in (b"", b"ranker", b"0" * 4096):
        pin.write_bytes(damage)
        refused = world.pull("--json")
        assert (refused.code, refused.error["error"]) == (6, "NotTrusted"), refused.err
        assert refused.error["hint"].endswith(f"rm {shlex.quote(str(pin))}")
    pin.unlink()
    assert world.pull().code == 0
    assert pin.read_bytes() == content


def test_a_delta_of_another_model_is_not_taken(world: World) -> None:
    world.pull()
    world.machines["staging"].go_on(60)
    world.push("staging")
    path = f"{LOG}/{30:020d}-{60:020d}"
    world.steal(path)
    ran = world.pull("--json")
    assert (ran.code, "of another model" in ran.error["message"]) == (6, True)
    assert not (world.copy / path).exists()


def test_a_first_pull_says_what_it_pins_and_does_not_choose_between_two(world: World) -> None:
    number = world.new_base("staging")
    world.push("staging")
    world.steal(str(number))
    refused = world.pull("--json")
    assert (refused.code, "publications of 2 models" in refused.error["message"]) == (6, True)
    assert pinned_identity(world.copy) is None
    identity = world.identity("prod")
    taken = world.pull("--signed-as", f"ranker@{identity}")
    assert (taken.code, f"{identity}: from now on this copy takes no other" in taken.out) == (6, True)
    assert (world.copy / "10").exists()
    assert not (world.copy / str(number)).exists()
    assert pinned_identity(world.copy) == identity
    with pytest.raises(NotTrusted, match="publications of 2 models"):
        api.rollback(world.url("prod"), 10, signing=Signing(str(world.private)))
    named = Signing(str(world.private), signed_as=f"ranker@{identity}")
    with pytest.raises(NotTrusted, match="of another model"):  # the newest version decides
        api.rollback(world.url("prod"), 10, signing=named)
    for key in world.bucket.keys(f"prod/ranker/{number}/"):
        world.bucket.delete(key)
    with opened(world.url("prod"), signing=named) as target:
        target.carry(lambda: rollback(target.path, 20))
    world.pull()
    (delta,) = (world.copy / LOG).glob("*-*31")
    assert read_manifest(delta).identity == identity


def test_a_model_that_is_begun_anew_in_its_place_has_to_be_named(world: World, tmp_path: Path) -> None:
    world.pull()
    for key in world.bucket.keys("prod/ranker/"):
        world.bucket.delete(key)
    anew = tmp_path / "anew"
    with in_force(anew / "model", Signer.of(str(world.private), "ranker")):
        machine = machine_in(anew)
        machine.go_on(70)
        rebase(machine.model)
        shutil.rmtree(machine.base)
        shutil.rmtree(machine.model / "deltas")
        pushed(machine.model, world.url("prod"))
    refused = world.pull("--json")
    assert (refused.code, "another model" in refused.error["message"]) == (6, True)
    option = shlex.split(refused.error["hint"].partition("is meant: ")[2])
    assert option[0] == "--signed-as"
    before = pinned_identity(world.copy)
    assert world.pull(*option).code == 0
    assert pinned_identity(world.copy) == option[1].partition("@")[2] != before
    assert world.pull().code == 0


def test_a_model_that_is_copied_on_purpose_stays_the_same(world: World, tmp_path: Path) -> None:
    world.pull()
    shutil.copytree(world.machines["prod"].model, tmp_path / "ranker")
    assert export_model("push", tmp_path / "ranker", world.bucket.url("eu/ranker")).code == 0
    copied = export_model("pull", world.bucket.url("eu/ranker"), tmp_path / "eu", "--trust", world.public)
    assert (copied.code, pinned_identity(tmp_path / "eu")) == (0, world.identity("prod"))


def test_another_key_changes_nothing_of_whose_model_it_is(world: World, tmp_path: Path) -> None:
    world.pull()
    (tmp_path / "next").mkdir()
    private, public = key_pair(tmp_path / "next")
    machine = world.machines["prod"]
    with in_force(machine.model, Signer.of(str(private), "ranker")):
        world.new_base("prod")
    world.push("prod")
    assert world.pull("--trust", public).code == 0
    assert {read_manifest(each.path).identity for each in version_dirs(world.copy)} == {
        world.identity("prod")
    }


def unsaid(world: World, model: Path) -> None:
    """Make a model one that an earlier release has published and signed: it has no identity."""
    signer = Signer.of(str(world.private), "ranker")
    for path in [*model.glob("*/manifest.json"), *model.glob("deltas/*/*/manifest.json")]:
        lines = [line for line in path.read_text().splitlines(keepends=True) if '"identity"' not in line]
        place = path.parent.relative_to(model).as_posix()
        manifest = replace(from_json("".join(lines)), signature=None)
        path.write_text(to_json(signer.signed(manifest, place)))


def test_a_model_of_an_earlier_release_is_taken_and_gets_an_identity_with_its_next_base(
    world: World, tmp_path: Path
) -> None:
    machine = world.machines["prod"]
    unsaid(world, machine.model)
    url = world.bucket.url("old/ranker")
    pushed(machine.model, url)
    pull = ("pull", url, world.copy, "--trust", world.public)
    ran = export_model(*pull)
    assert (ran.code, "does not say which model it is" in ran.err) == (0, True)
    assert (pinned_identity(world.copy), (world.copy / "10").exists()) == (None, True)
    machine.go_on(40)
    pushed(machine.model, url)
    assert export_model(*pull).code == 0
    assert rebase(machine.model) is not None
    pushed(machine.model, url)
    ran = export_model(*pull)
    assert (ran.code, "takes no other" in ran.out, ran.err) == (0, True, "")
    assert pinned_identity(world.copy) == world.identity("prod")
    assert export_model("pull", url, tmp_path / "fresh", "--trust", world.public).code == 0
    assert pinned_identity(tmp_path / "fresh") == world.identity("prod")


def test_a_base_without_identity_does_not_come_after_one_that_has_it(world: World) -> None:
    """What an earlier release signed for another model of this name is not brought in by its silence."""
    world.pull()
    number = world.new_base("staging")
    unsaid(world, world.machines["staging"].model)
    model = world.machines["staging"].model / str(number)
    for file in (path for path in model.rglob("*") if path.is_file()):
        name = file.relative_to(model).as_posix()
        world.bucket.put(f"prod/ranker/{number}/{name}", file.read_bytes())
    ran = world.pull("--json")
    assert (ran.code, "does not say of which model" in ran.error["message"]) == (6, True)
    assert not (world.copy / str(number)).exists()


def test_a_base_without_identity_names_the_command_that_replaces_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No delta follows it, so that there is nothing to merge."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    words = ("--ckpt-dir", "train", "--model", "model.py:build", "--out", "ranker")
    for step in (10, 20):
        save(Path("train"), step)
        ran = export_model(*words, "--sign-key", world.private, "--new-base", "always")
        assert ran.code == 0, ran.err
    base, model = Path("ranker/20"), Path("ranker")
    identity = read_manifest(base).identity
    manifest = replace(read_manifest(base), identity=None, signature=None)
    (base / "manifest.json").write_text(
        to_json(Signer.of(str(world.private), "ranker").signed(manifest, base.name))
    )
    look = ("verify", model, "--trust", world.public, "--signed-as", f"ranker@{identity}", "--json")
    refused = export_model(*look)
    assert (refused.code, "does not say of which model" in refused.error["message"]) == (6, True), refused.err
    typed = refused.error["hint"].partition("publish a base with this release: ")[2]
    assert "nothing to do" in export_model("merge", model, "--rebase", "--sign-key", world.private).out
    again = export_model(*shlex.split(typed.partition("&& export-model ")[2]))
    assert again.code == 0, (typed, again.err)
    assert read_manifest(model / "21").identity == identity


def test_an_update_takes_what_the_name_says_until_it_is_pinned(world: World) -> None:
    copy = LocalCopy(world.url("prod"), world.copy, trust=Trust.of([world.public], "ranker"))
    first, second = copy.update(), copy.update()
    assert (first.is_pinned_now, second.is_pinned_now) == (True, False)
    assert first.identity == second.identity == world.identity("prod")
    document = json.loads((world.copy / "10" / "manifest.json").read_text())
    assert document["identity"] == first.identity
