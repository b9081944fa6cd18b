"""A process that loads untrusted files, for tests: it may answer or refuse, but not crash, hang or swell.

Every line on standard input is a file's content in hexadecimal; every line of output says what came of it.
"""

import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch

import harp
from harp.engine import footprint
from harp.engine.native import bindings
from harp.errors import HarpError

LIMIT, SLACK = 1 << 26, 1 << 30  # bytes that a file may take, and that may be allocated for all of it
SECONDS = 30
WORK = 1 << 31 if bindings.kernels() else 1 << 26  # multiplications of a few seconds; dilated ones of torch are slow


def tried(content: bytes, path: Path) -> str:
    """What comes of a file: an answer, a refusal in one line, or a defect."""
    path.write_bytes(content)
    try:
        network = harp.load(path, limit=LIMIT)
        shape = network.graph.input_shape
        answers = [np.asarray(network(np.full((count, *shape), 0.5, np.float32))) for count in (1, 3)]
        return f"answer {answers[0].shape} {answers[1].shape}"
    except HarpError as error:
        text = str(error)
        return f"defect: long message {text[:2000]!r}" if "\n" in text or len(text) > 1000 else f"refused {text}"
    except BaseException:
        return "defect: " + traceback.format_exc().replace("\n", "\\n")


def main() -> None:
    """Try files until there are no more."""
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)  # what is set up at the first call is no file's fault
    footprint.MOST_WORK = WORK
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    most = 1024 * int(held.split()[1]) + SLACK
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            signal.alarm(SECONDS)
            print(tried(bytes.fromhex(line), Path(folder) / "a.harp"), flush=True)
            signal.alarm(0)


if __name__ == "__main__":
    main()
