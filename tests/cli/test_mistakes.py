"""Wrong and unusual command lines: each ends in one clear line and a documented exit code, and writes nothing."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from harp import models
from harp.experiments import compare, run
from harp.experiments.estimate import stages
from harp.models.weights import save_model
from support.commands import Harp

PRUNE = "prune tinynet --data digits --keep 5%"

# The words of a command, and what its one line on standard error must say.
MISTAKES = [
    # commands and options
    ("prunne", "Did you mean 'prune'", "harp --help"),
    ("submit", "Missing command", "harp submit --help"),
    ("submit abp", "Did you mean 'apb'"),
    ("run", "Missing argument 'recipe'", "harp run --help"),
    ("run demo extra", "extra"),
    ("run demo --sed 3", "--sed", "--set"),
    ("run demo --devises 2", "--devices"),
    ("prune tinynet --keep 5%", "Missing option '--data'"),
    ("prune tinynet --data digits", "Missing option '--keep'"),
    ("plan vgg16 --keep", "--keep", "requires an argument"),
    ("list", "Missing argument 'what'"),
    ("slim tinynet", "Missing option '--out'"),
    ("export tinynet --data digits", "Missing option '--to'"),
    ("submit robustbench folder", "Missing option '--name'"),
    ("report", "Missing argument 'runs'"),
    # numbers
    ("run demo --devices x", "--devices x: give a whole number"),
    ("run demo --devices 1.5", "--devices", "whole number"),
    ("run demo --devices 0", "--devices 0: give at least 1"),
    ("run demo --nodes 0", "--nodes", "1"),
    ("run demo --nodes 2", "--main-address"),
    ("run demo --node-rank -1", "--node-rank", "0"),
    ("run demo --minutes -1", "--minutes", "0"),
    ("run demo --max-minutes 0", "give more than 0"),
    ("run demo --keep-states=0", "--keep-states", "at least 1"),
    ("run demo --workers -1", "--workers", "0"),
    (f"{PRUNE} --batch 0", "--batch", "1"),
    (f"{PRUNE} --seed -1", "--seed", "0"),
    (f"{PRUNE} --pretrain -1", "--pretrain", "0"),
    (f"{PRUNE} --channels --multiple 0", "--multiple", "1"),
    ("plan vgg16 --keep 1% --classes 0", "--classes", "1"),
    ("plan vgg16 --keep 1% --shape 32x32", "like 3x32x32"),
    ("estimate demo --steps 0", "--steps", "1"),
    ("estimate demo --images x", "like 1281167"),
    ("estimate demo --shape 3", "like 3x32x32"),
    ("evaluate tinynet --data digits --batch 0", "--batch", "1"),
    ("evaluate tinynet --data digits --examples 0", "--examples", "1"),
    ("bench tinynet --batch 0", "--batch", "1"),
    ("bench tinynet --batch x", "--batch x: give a whole number"),
    ("compare fashion --methods harp --jobs 0", "--jobs", "1"),
    ("compare fashion --methods harp --seeds x", "seed 'x'", "whole number"),
    ("compare fashion --methods harp --keep x", "keep 'x'", "a share above 0"),
    ("shard folder out --count 0", "--count", "1"),
    # names
    ("run demmo", "did you mean 'demo'?"),
    ("run cifar10/resnet81", "did you mean 'cifar10/resnet18'?"),
    ("run demo --method hydrra", "did you mean 'hydra'?"),
    ("run demo --strategy erkk", "did you mean 'erk'?"),
    ("run demo --objective tradess", "did you mean 'trades'?"),
    ("run demo --accelerator gppu", "gppu"),
    ("run demo --set seed", "like stages.prune.epochs=5"),
    ("run demo --set sede=1", "did you mean 'seed'?"),
    ("run demo --set seed=x", "valid integer", "'x'"),
    ("run demo --set stages.prun.epochs=3", "'prun'"),
    ("prune tinynt --data digits --keep 5%", "did you mean 'tinynet'?"),
    ("prune VGG-16 --data digits --keep 5%", "did you mean 'vgg16'?"),
    ("prune tinynet --data digts --keep 5%", "did you mean", "digits"),
    (f"{PRUNE} --method hydra+lmap", "did you mean 'lamp'?"),
    (f"{PRUNE} --method harp:reech=1", "did you mean 'reach'?"),
    (f"{PRUNE} --budget flops", "weights, macs"),
    (f"{PRUNE} --channels --budget flosp", "did you mean 'flops'?"),
    ("plan resnet19 --keep 1%", "did you mean 'resnet18'?"),
    ("plan fashon --keep 1%", "did you mean 'fashion'?"),
    ("plan vgg16 --keep 1% --strategy lmp", "did you mean 'lamp'?"),
    ("list modles", "did you mean 'models'?"),
    ("list models resnet19", "did you mean 'resnet18'?"),
    ("evaluate tinynet --data digits --attack pdg-20", "did you mean 'pgd-20'?"),
    ("evaluate tinynet --data digits --attack autoatack", "did you mean 'autoattack'?"),
    ("evaluate tinynet --data digits --norm l1", "linf or l2"),
    ("export tinynet --data digits --to spars", "did you mean 'sparse'?"),
    ("slim tinynet --out s --keep 5% --budget flosp", "did you mean 'flops'?"),
    ("doctor tinynet --data digts", "did you mean", "digits"),
    ("compare fashon", "did you mean 'fashion'?"),
    ("compare fashion --methods hydrra", "did you mean 'hydra'?"),
    ("compare fashion --methods harp --rank-by pdg-10", "did you mean 'pgd'?"),
    ("compare fashion", "--methods"),
    ("compare fashion --launcher slrum", "did you mean 'slurm'?"),
    ("compare fashion --dry-run", "--launcher slurm"),
    ("reproduce overveiw", "did you mean 'overview'?"),
    ("reproduce --small", "needs a claim"),
    ("estimate", "harp list recipes"),
    ("estimate demmo", "did you mean 'demo'?"),
    ("submit robustbench folder --name x", "like Zhao2023Holistic"),
    # files that are missing, or of another kind
    ("run missing.yaml", "no recipe file missing.yaml"),
    ("run folder", "folder is a folder"),
    ("run empty.yaml", "empty.yaml is no recipe", "mapping"),
    ("run list.yaml", "list.yaml is no recipe", "mapping"),
    ("run bad.yaml", "bad.yaml can't be read"),
    ("run tiny.safetensors", "tiny.safetensors can't be read"),
    ("run demo --out text.txt", "output folder text.txt"),
    ("prune missing.py:net --data digits --keep 5%", "there is no file", "missing.py"),
    ("prune net.py --data digits --keep 5%", "net.py:FUNCTION"),
    ("prune net.py:net --data digits --keep 5%", "no function 'net'"),
    ("prune net.py:nothing --data digits --keep 5%", "must return a torch.nn.Module"),
    ("prune syntax.py:net --data digits --keep 5%", "syntax.py", "line 1"),
    ("prune tinynet --data missing.npz --keep 5%", "missing.npz: no such file"),
    ("prune tinynet --data empty.npz --keep 5%", "empty.npz: damaged"),
    ("prune tinynet --data other.npz --keep 5%", "other.npz", "x_train"),
    ("prune tinynet --data cifar10 --data-dir folder --keep 5%", "cifar-10-python.tar.gz"),
    (f"{PRUNE} --weights missing.pt", "can't read missing.pt"),
    (f"{PRUNE} --weights folder", "can't read folder", "directory"),
    (f"{PRUNE} --weights empty.pt", "empty.pt is empty"),
    (f"{PRUNE} --weights text.txt", "text.txt"),
    ("prune vgg8 --data digits --keep 5% --weights tiny.safetensors", "same architecture"),
    ("evaluate nothere", "there is no run 'nothere'"),
    ("evaluate tinynet", "--data"),
    ("evaluate folder", "folder is no run"),
    ("evaluate text.txt", "text.txt is a file"),
    ("evaluate missing.harp", "can't read missing.harp"),
    ("evaluate empty.harp", "no .harp file"),
    ("evaluate tinynet --data digits --corruptions folder", "CIFAR-10-C"),
    ("evaluate tinynet --data digits --twin tinynet", "a twin is for a .harp or .onnx file"),
    ("export folder --to sparse", "folder is no run"),
    ("export text.txt --to sparse", "text.txt is a file"),
    ("bench missing.harp", "can't read missing.harp"),
    ("bench empty.harp", "no .harp file"),
    ("bench folder", "folder is no run"),
    ("slim folder --out s", "folder is no run"),
    ("slim tinynet --out folder", "folder is not empty"),
    ("report missing", "missing is no run"),
    ("report folder", "folder is no run"),
    ("submit apb missing", "missing is no run"),
    ("shard missing out", "missing", "expected the folders train and test"),
    ("shard text.txt out", "text.txt", "expected the folders train and test"),
    ("reproduce overview --check missing", "--check missing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the wrong kind."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("yaml", "npz", "pt", "harp"):
        (folder / f"empty.{name}").touch()
    (folder / "folder").mkdir()
    (folder / "folder" / "text.txt").write_text("hello\n")
    (folder / "text.txt").write_text("hello\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "bad.yaml").write_text("a: [1\n")
    (folder / "net.py").write_text("def nothing(): return None\n")
    (folder / "syntax.py").write_text("def net(:\n")
    np.savez(folder / "other.npz", a=np.zeros(3))
    save_model(folder / "tiny.safetensors", models.build("tinynet", num_classes=10, shape=(1, 8, 8)))
    return folder


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[0])
def test_a_mistake_is_explained_in_one_line(
    harp: Harp, folder: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...]
) -> None:
    def began(*arguments: object, **options: object) -> None:
        pytest.fail("it began to work")

    monkeypatch.setattr(run.Run, "execute", began)
    monkeypatch.setattr(compare.Comparison, "execute", began)
    monkeypatch.setattr(stages, "estimate", began)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = sorted(folder.rglob("*"))
    words, *expected = case
    code, out, err = harp(*shlex.split(words))
    assert code == 2, err
    assert out == ""
    *notes, line = err.splitlines()
    assert len(notes) <= 1, err
    assert line.startswith("error: "), err
    assert "Traceback" not in err and len(line) <= 400
    for text in expected:
        assert text in line
    assert sorted(folder.rglob("*")) == before, "nothing may be written"


UNUSUAL = [
    ("", 0, "Usage: harp"),
    ("--help", 0, "Exit codes"),
    ("-h", 0, "Exit codes"),
    ("--version", 0, "harp 0."),
    ("list models VGG", 0, "vgg16"),
    ("plan tinynet --keep 100%", 0, "100.000%"),
    ("plan tinynet --keep 1/3", 0, "total"),
    ("plan tinynet --keep=.5", 0, "total"),
    ("plan tinynet --keep 1% --shape 3,32,32", 0, "total"),
    ("doctor syntax.py:net", 2, "syntax.py"),
    ("doctor tinynet --data digits --no-channels", 0, "findings"),
    ("doctor soft.py:net --data digits --no-channels", 1, "softmax"),
]


@pytest.mark.parametrize(("words", "expected", "said"), UNUSUAL, ids=lambda value: str(value))
def test_unusual_command_lines_do_the_sensible_thing(
    harp: Harp, folder: Path, words: str, expected: int, said: str
) -> None:
    Path("syntax.py").write_text("def net(:\n")
    Path("soft.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))\n"
    )
    code, out, err = harp(*shlex.split(words))
    assert code == expected, err
    assert said in out + err
