"""How the command behaves in a shell: Ctrl-C at any moment, closed pipes, encodings, narrow terminals, and its help."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harp.cli import groups, listing
from harp.cli.commands import PIPE_CLOSED, group
from harp.errors import UNFINISHED
from harp.system.nearest import unknown
from harp.system.progress import Terminal
from harp.system.table import print_table
from harp.system.text import STAND_INS, printable
from support.commands import Harp
from support.documents import json_keys
from support.paths import ROOT

# The command, which is sent a signal while it imports a module.
SIGNALLED = """
import os, sys
module, number, *sys.argv[1:] = sys.argv[1:]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), int(number))
                import json  # a signal is handled between two instructions
            except Exception:
                pass  # as modules do that try to import others

sys.meta_path.insert(0, Finder())
from harp.cli import main
main()
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, env=environment, timeout=120)


def harp_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "harp", *words]


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("harp.cli.commands", signal.SIGINT, 130),
        ("typer", signal.SIGINT, 130),
        ("typer", signal.SIGTERM, UNFINISHED),
        ("torch", signal.SIGINT, 130),
        ("harp.models", signal.SIGTERM, UNFINISHED),
    ],
)
def test_a_signal_during_the_start_ends_in_one_line(module: str, number: int, code: int) -> None:
    words = ["plan", "tinynet", "--keep", "1%"]
    done = run(sys.executable, "-c", SIGNALLED, module, str(int(number)), *words)
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    (line,) = done.stderr.decode().strip().splitlines()
    assert line.startswith("stopped")


def test_a_signal_in_a_destructor_ends_the_command() -> None:
    code = """
import os, signal, sys
sys.argv = ["harp", "list", "models"]
from harp.cli import listing, main
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        json.dumps(1)
import json
rows = listing.rows
def late(*words):
    Late()
    return rows(*words)
listing.rows = late
main()
"""
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr.strip() == b"stopped"


def test_a_reader_that_is_gone_ends_the_command_silently() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        done = subprocess.run(harp_command("list", "models"), stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(harp_command("list", "models"), stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert done.stderr.decode().count("\n") == 1 and done.stderr.startswith(b"error: ")


def test_closed_output_is_no_error() -> None:
    command = [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"]
    done = run(*command, *harp_command("list", "models"))
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_degrades_to_what_the_encoding_has(encoding: str) -> None:
    variables = {"PYTHONUTF8": "0", "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = run(*harp_command("plan", "tinynet", "--keep", "1%"), **variables)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[2].endswith(b"0.926%  -")


@pytest.fixture
def ascii_only(harp: Harp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run the command with an output of ASCII: its exit code and both streams."""

    def command(*words: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        code, _, _ = harp(*words)
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode("ascii") for stream in streams)  # type: ignore[attr-defined]
        return code, out, err

    yield command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan tinynet --keep 50%", "##########"),
        ("doctor tinynet --data digits", "+ gradients"),
        ("list methods", "harp-r"),
        ("list recipes", "--strategy"),
        ("reproduce ablation --small --check .", "verdict"),
        ("--help", "Exit codes"),
        ("prune --help", "Pruning"),
        ("evaluate tinynet --data digits --attack fgsm --examples 20", "95 % interval"),
    ],
)
def test_every_output_can_be_ascii(ascii_only: Any, words: str, expected: str) -> None:
    code, out, err = ascii_only(*words.split())
    assert code in (0, 1), err
    assert expected in out


def test_errors_and_json_can_be_ascii(ascii_only: Any) -> None:
    code, _, err = ascii_only("run", "größe→.yaml")
    assert code == 2 and r"gr\xf6\xdfe->.yaml" in err
    code, out, _ = ascii_only("list", "data", "--json")
    assert code == 0 and json.loads(out)["list"] == "data"


def test_a_file_name_that_is_no_text_can_be_printed() -> None:
    done = run(*[os.fsencode(word) for word in harp_command("run")], b"\xff\xfe.yaml")  # type: ignore[arg-type]
    assert done.returncode == 2
    assert rb"\udcff\udcfe.yaml" in done.stderr and done.stderr.count(b"\n") == 1


def test_stand_ins_are_ascii_and_tables_stay_in_line() -> None:
    assert all(text.isascii() for text in STAND_INS.values())
    assert printable("✓ 5 ± 1 … 中", "ascii") == r"+ 5 +- 1 ... \u4e2d"
    assert printable("✓", "utf-8") == printable("✓", None) == "✓"


ROWS = [["classifier.0.weight", "131,072", "1,311", "1.000%", "█" * 20], ["x", "1", "1", "100.000%", "▏"]]


def shown(width: int, columns: list[str], rows: list[list[str]], **options: Any) -> list[str]:
    file = io.StringIO()
    print_table(Console(file=file, width=width, color_system=None, **options), "title", columns, rows)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [200, 80, 60, 40, 20])
def test_tables_keep_every_number_at_any_width(width: int) -> None:
    lines = shown(width, ["layer", "weights", "kept", "rate", ""], ROWS)
    assert max(map(len, lines)) <= width
    words = set(" ".join(lines).split())
    assert {"classifier.0.weight", "131,072", "1,311", "1.000%", "100.000%"} <= words
    assert any("█" in line for line in lines) == (width >= 68)
    assert (len(lines) == 2 + len(ROWS)) == (width >= 60), "one line a row where there is room"


def test_words_are_wrapped_where_there_is_no_room() -> None:
    lines = shown(40, ["models", ""], [["vgg16", "VGG16 with batch norm for 32x32 images, as in the HARP paper"]])
    assert len(lines) == 4 and max(map(len, lines)) <= 40


def bars(width: int) -> str:
    """The last bar on a terminal of this width."""
    file = io.StringIO()
    variables: Mapping[str, str] = {}
    console = Console(file=file, force_terminal=True, width=width, color_system=None, _environ=variables)
    display = Terminal(console)
    with display.training("fashion prune (2 of 3)", 10, 1200):
        display.step({"epoch": 3, "step": 100, "loss": 1.234, "rate": 0.0123, "natural": 0.5, "robust": 0.3})
    return re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").strip("\n").splitlines()[-1]


@pytest.mark.parametrize("width", [140, 80, 60, 40])
def test_a_bar_fits_with_count_and_time_left(width: int) -> None:
    line = bars(width)
    assert len(line) <= width
    assert "━" in line and "3700/12000" in line and "-:--" in line
    assert ("epoch 4/10" in line) == (width >= 60)
    assert ("robust 30.0%" in line) == (width >= 140)


@pytest.mark.parametrize("variables", [{}, {"TERM": "dumb"}])
def test_without_a_terminal_that_can_move_its_cursor_there_are_only_lines(variables: dict[str, str]) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=bool(variables), width=80, _environ=variables)
    display = Terminal(console)
    with display.training("prune", 2, 10):
        for step in range(10):
            display.step({"epoch": 0, "step": step, "loss": 1.0})
        display.epoch({"epoch": 1, "loss": 1.0})
    (line,) = file.getvalue().splitlines()
    assert line.startswith("prune: epoch 1/2, loss 1.000, ") and line.isprintable()


def test_a_pipe_has_one_line_a_row_unless_columns_are_given(harp: Harp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = harp("list", "methods")[1].splitlines()
    assert len(wide) == 1 + len(listing.rows("methods"))
    monkeypatch.setenv("COLUMNS", "50")
    narrow = harp("list", "methods")[1].splitlines()
    assert len(narrow) > len(wide) and max(map(len, narrow)) <= 50


def test_no_colour_where_none_is_wanted() -> None:
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    words = harp_command("list", "models")
    coloured = run(sys.executable, "-c", code, *words, TERM="xterm", NO_COLOR="")
    plain = run(sys.executable, "-c", code, *words, TERM="dumb")
    assert b"\x1b[" in coloured.stdout and b"\x1b[" not in plain.stdout
    assert b"\x1b[3" not in run(sys.executable, "-c", code, *words, TERM="xterm", NO_COLOR="1").stdout


def test_what_harp_list_shows_is_what_harp_knows() -> None:
    names = json.loads(listing.NAMES.read_text(encoding="utf-8"))
    assert names == json.loads(json.dumps(listing.known())), "run scripts/make-names"


@pytest.mark.parametrize("words", [["list", "recipes"], ["prune", "--help"], ["prunne"]])
def test_quick_commands_do_not_load_torch(words: list[str]) -> None:
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
    done = run(sys.executable, "-c", f"{code}from harp.cli import main; main()", *words)
    assert done.stderr.splitlines()[-1] == b"False", done.stderr


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield words, command
    for name, child in inner.items():
        yield from commands(child, (*words, name))


ALL = dict(commands(group()))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_options_are_in_groups_and_their_order_is_the_same_everywhere(words: tuple[str, ...]) -> None:
    order = [name for names in groups.GROUPS.values() for name in names]
    options = [p for p in ALL[words].params if p.param_type_name == "option" and not p.hidden]
    missing = {option.name for option in options} - {*order, "help"}
    assert not missing, f"give them a group in cli/groups.py: {missing}"
    places = [order.index(option.name) for option in options if option.name != "help"]
    assert places == sorted(places)
    assert all(option.rich_help_panel for option in options if option.name != "help")
    assert any(option.name == "as_json" for option in options)


def test_the_same_option_has_the_same_name_everywhere() -> None:
    names: dict[str, set[str]] = {}
    for command in ALL.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                names.setdefault(parameter.name, set()).add(parameter.opts[0])
    assert all(len(spellings) == 1 for spellings in names.values())


@pytest.mark.parametrize("command", groups.PAGES)
def test_the_json_of_every_command_is_documented(command: str) -> None:
    assert json_keys(command)


@pytest.mark.parametrize("command", groups.PAGES)
def test_the_page_of_every_command_exists(command: str) -> None:
    assert {words[0] for words in ALL} == set(groups.PAGES)
    assert (ROOT / groups.PAGES[command]).is_file()


def test_the_help_of_prune_fits_on_two_screens(harp: Harp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = harp("prune", "--help")[1]
    assert len(out.splitlines()) <= 100
    assert "default: 128" in out and "docs/reference/methods.md" in out


def test_the_message_of_an_unknown_name() -> None:
    assert unknown("model", "VGG61", ["vgg16", "other"]) == "unknown model 'VGG61': did you mean 'vgg16'?"
    assert unknown("model", "zzz", ["a", "b"]) == "unknown model 'zzz': one of a, b"
    assert unknown("model", "zzz", [str(n) for n in range(30)], "harp x").endswith("`harp x` shows all 30")
