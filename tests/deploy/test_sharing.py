"""Runs on a hub, against a stand-in on this machine: pushed, fetched, used by name, refused."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

import harp
from harp.errors import CheckpointError, MissingExtra, ModelError, RecipeError
from harp.experiments.recipe import parse
from harp.models import build
from harp.system import hub as client
from support import finished_run
from support import hub as stand_in

pytest.importorskip("huggingface_hub", reason='the hub needs: pip install "harp-prune[hub]"')


# Of the library, about its own HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NETS = """
from torch import nn
def net(num_classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], num_classes))
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stand_in.Hub]:
    with stand_in.running() as running:
        use(running, tmp_path, monkeypatch)
        yield running


def use(running: stand_in.Hub, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the library talk to a stand-in, and keep its cache in a folder."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", running.address)
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.setenv("HF_TOKEN", stand_in.TOKEN)


def run(folder: Path, **parts: object) -> Path:
    """A finished run."""
    folder = folder / "runs" / "made-0123456789ab"
    parts = {"data": "digits", "model": {"name": "tinynet", "width": 4}, **parts}
    results = [finished_run.score("natural", 80, 100), finished_run.score("pgd-20", 40, 100, 0.1)]
    finished_run.make(folder, finished_run.content(**parts), results=results)
    return folder


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A run, and what a push made of it."""
    folder = run(tmp_path_factory.mktemp("pushed"))
    with stand_in.running() as running, pytest.MonkeyPatch.context() as patch:
        use(running, folder, patch)
        address = harp.push(folder, "me/net", license="apache-2.0")
        assert address.startswith(f"{running.address}/me/net/commit/")
        return folder, running.newest("me/net")


@pytest.fixture
def folder(hub: stand_in.Hub, pushed: tuple[Path, dict[str, bytes]]) -> Path:
    """The folder of the run that is on the hub as me/net."""
    hub.commit("me/net", pushed[1])
    return pushed[0]


def amended(hub: stand_in.Hub, **changes: object) -> str:
    """Commit other files to me/net, with a manifest that fits; keys have _ for a dot."""
    files = {name.replace("_", "."): content for name, content in changes.items()}
    encoded = {n: c if isinstance(c, bytes) else yaml.safe_dump(c).encode() for n, c in files.items()}
    manifest = json.loads(hub.newest("me/net")["digests.json"])
    manifest["files"] |= {name: hashlib.sha256(content).hexdigest() for name, content in encoded.items()}
    return hub.commit("me/net", {**encoded, "digests.json": json.dumps(manifest).encode()})


def recipe_on(hub: stand_in.Hub, model: object) -> dict[str, object]:
    return {**yaml.safe_load(hub.newest("me/net")["recipe.yaml"]), "model": model}


def test_a_pushed_run_comes_back_by_name(hub, folder):
    local, remote = harp.load_run(folder), harp.load_run("hf:me/net")
    for name, tensor in local.model.state_dict().items():
        assert torch.equal(tensor, remote.model.state_dict()[name])
    assert all(torch.equal(mask, remote.masks[name]) for name, mask in local.masks.items())
    images = torch.rand(4, *local.shape)
    answers = harp.load("hf:me/net")(images.numpy())
    assert np.allclose(answers, local.model(images).detach().numpy(), atol=2e-2)
    assert set(hub.newest("me/net")) == {"README.md", "digests.json", *client.FILES} - {"slim.json"}


def test_the_page_states_licence_tags_and_numbers(pushed):
    page = pushed[1]["README.md"].decode()
    matter = yaml.safe_load(page.split("---\n")[1])
    assert matter["license"] == "apache-2.0" and "**Licence**: apache-2.0" in page
    assert matter["library_name"] == "harp" and "adversarial-robustness" in matter["tags"]
    values = [metric["value"] for metric in matter["model-index"][0]["results"][0]["metrics"]]
    assert values == [80.0, 40.0]
    assert 'harp.load("hf:me/net")' in page


def test_no_path_of_this_machine_is_published(hub, tmp_path):
    nets = tmp_path / "secret" / "nets.py"
    nets.parent.mkdir()
    nets.write_text(NETS)
    model = {"name": f"{nets}:net", "weights": f"{tmp_path}/secret/dense.pt"}
    harp.push(run(tmp_path, model=model), "me/net", private=True)
    assert hub.repositories["me/net"].private
    for name, content in hub.newest("me/net").items():
        assert b"secret" not in content, name


def test_code_of_strangers_does_not_run_but_a_definition_of_ones_own_does(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the recipe's nets.py:net would be found
    Path("nets.py").write_text("raise SystemExit")
    amended(hub, recipe_yaml=recipe_on(hub, "nets.py:net"))
    shape = harp.load_run(folder).shape
    for attempt in (lambda: harp.load_run("hf:me/net"), lambda: build("hf:me/net", num_classes=10, shape=shape)):
        with pytest.raises(ModelError, match=r"in Python code.*--weights hf:me/net"):
            attempt()
    model = build("tinynet", num_classes=10, shape=shape, width=4)
    harp.load_weights(model, "hf:me/net")
    assert torch.equal(next(model.parameters()), next(harp.load_run(folder).model.parameters()))
    part = {"name": "tinynet", "width": 4, "weights": "hf:me/net"}
    assert Path(parse(finished_run.content(model=part)).model.weights).is_file()


def test_it_is_a_model_with_weights_in_a_recipe(hub, folder):
    content = finished_run.content(data="digits", model="hf:me/net")
    made = parse(content)
    assert (made.model.name, made.model.options) == ("tinynet", {"width": 4})
    assert made.model.weights is not None and Path(made.model.weights).name == "model.safetensors"
    sha = hub.repositories["me/net"].commits[-1][0]
    assert parse({**content, "model": f"hf:me/net@{sha}"}).model == made.model
    local = harp.load_run(folder)
    model = build("hf:me/net", num_classes=10, shape=local.shape)
    assert torch.equal(next(model.parameters()), next(local.model.parameters()))


def test_an_older_revision_is_found_by_its_hash(hub, folder):
    first = hub.repositories["me/net"].commits[-1][0]
    state = {name: tensor * 2 for name, tensor in harp.load_run(folder).model.state_dict().items()}
    amended(hub, model_safetensors=safetensors.torch.save(state))
    newest, older = harp.load_run("hf:me/net").model, harp.load_run(f"hf:me/net@{first}").model
    assert torch.equal(next(newest.parameters()), 2 * next(older.parameters()))
    with pytest.raises(CheckpointError, match="no such revision"):
        harp.load_run("hf:me/net@other")


def test_a_private_repository_needs_a_token(hub, folder, monkeypatch):
    hub.repositories["me/net"].private = True
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CheckpointError, match="no such repository, or it is private: log in"):
        harp.load_run("hf:me/net")
    with pytest.raises(CheckpointError, match=r"does not permit this \(401\): log in"):
        client.publish("hf:me/net", {"README.md": b""})
    monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
    assert harp.load_run("hf:me/net").masks


def test_failures_are_a_line(hub):
    with pytest.raises(CheckpointError, match="no such repository"):
        harp.load_run("hf:me/none")
    with pytest.raises(CheckpointError, match=r"does not permit this \(403\)"):
        client.publish("hf:others/net", {"README.md": b""})
    hub.commit("me/other", {"README.md": b"", "pytorch_model.bin": b"\x80"})
    with pytest.raises(CheckpointError, match=r"no network of harp: there is no digests\.json"):
        harp.load_run("hf:me/other")
    assert not any("pytorch_model.bin" in line for line in hub.asked)
    for name in ("hf:me", "hf:me/net/more", "hf:me/net@", "hf:../../etc"):
        with pytest.raises((RecipeError, CheckpointError)) as caught:
            harp.load_run(name)
        assert "\n" not in str(caught.value)


def test_a_broken_upload_is_a_line(hub):
    hub.full = True
    with pytest.raises(CheckpointError, match=r"upload of 'model\.safetensors' failed"):
        client.publish("hf:me/net", {"model.safetensors": b"x" * 99})


def test_without_a_network_the_cache_answers(hub, folder, monkeypatch):
    from huggingface_hub import constants

    before = harp.load_run("hf:me/net")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    after = harp.load_run("hf:me/net")
    assert torch.equal(next(before.model.parameters()), next(after.model.parameters()))
    with pytest.raises(CheckpointError, match="can't be reached"):
        harp.load_run("hf:me/unknown")


@pytest.mark.parametrize("file", ["model.safetensors", "network.harp", "recipe.yaml"])
def test_a_file_that_was_not_pushed_is_refused(hub, folder, file):
    hub.commit("me/net", {file: hub.newest("me/net")[file] + b" "})
    with pytest.raises(CheckpointError, match=f"{file} is not the one that was pushed"):
        harp.load_run("hf:me/net")


def test_files_and_manifest_must_fit(hub, folder):
    files = hub.newest("me/net")
    hub.repositories["me/net"].commits.append(("1" * 40, {k: v for k, v in files.items() if k != "masks.safetensors"}))
    with pytest.raises(CheckpointError, match=r"has no masks\.safetensors"):
        harp.load_run("hf:me/net")
    hub.repositories["me/net"].commits.append(("2" * 40, {**files, "slim.json": b"{}"}))
    with pytest.raises(CheckpointError, match=r"slim\.json is not the one"):
        harp.load_run("hf:me/net")
    hub.repositories["me/net"].commits.append(("3" * 40, {**files, "digests.json": b'{"format": 2}'}))
    with pytest.raises(CheckpointError, match="another version"):
        harp.load_run("hf:me/net")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "timm:resnet18", "checkpoint_path": "/etc/passwd"}, "checkpoint_path.*only numbers"),
        ("robustbench:Standard:/etc/passwd", "not one of harp, torchvision or timm"),
        ("hf:me/net", "not one of harp"),
        ("/tmp/evil.py:net", "in Python code"),
        ({"width": 3}, r"recipe\.yaml can't be used"),
    ],
)
def test_a_recipe_of_strangers_is_not_trusted(hub, folder, model, words):
    amended(hub, recipe_yaml=recipe_on(hub, model))
    for attempt in (lambda: harp.load_run("hf:me/net"), lambda: build("hf:me/net", num_classes=10, shape=(1, 28, 28))):
        with pytest.raises((ModelError, CheckpointError), match=words):
            attempt()


def test_an_interrupted_download_goes_on_where_it_stopped(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_after = 2000
    harp.load_run("hf:me/net")
    assert any("from 2000" in line for line in hub.ranges)


def test_the_command(hub, folder, harp, tmp_path):
    code, out, err = harp("push", str(folder), "me/again", "--private")
    assert code == 0, err
    assert out.startswith("pushed    hf:me/again (http://127.0.0.1") and hub.repositories["me/again"].private
    code, out, err = harp("push", str(tmp_path / "nothing"), "me/net")
    assert code == 2 and "is no run" in err
    code, out, err = harp("evaluate", "hf:me/net", "--attack", "fgsm", "--examples", "20", "--no-checks")
    assert code == 0, err
    assert "fgsm" in out and (tmp_path / "evaluations" / "net").is_dir()
    code, out, err = harp("prune", "hf:me/net", "--data", "digits", "--keep", "1%", "--weights", "x.pt")
    assert code == 2 and "has weights of its own" in err


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"harp-prune\[hub\]"):
        harp.load("hf:me/net")


def test_the_hub_needs_no_torch():
    code = "import sys, harp.system.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
