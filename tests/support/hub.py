"""A stand-in for the Hugging Face Hub on this machine: what `huggingface_hub` asks of it to push and to fetch."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    """The commits of a repository, each with all its files."""

    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=lambda: [("0" * 40, {})])

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub:
    """The repositories, the uploaded objects, and what was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.cut_after: int | None = None  # the next download ends after so many bytes
        self.full = False  # uploads fail
        self.address = ""

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """Add a commit without a client."""
        repository = self.repositories.setdefault(name, Repository())
        content = {**repository.commits[-1][1], **files}
        sha = hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()
        repository.commits.append((sha, content))
        return sha

    def newest(self, name: str) -> dict[str, bytes]:
        return self.repositories[name].commits[-1][1]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, content: bytes | object = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def _logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _readable(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._logged_in()):
            self._error(401 if not self._logged_in() else 404, "RepoNotFound")
            return None
        return repository

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?/?", path):
            self._describe(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._download(match[1], match[2], match[3])
        else:
            self._error(404, "EntryNotFound")

    def _describe(self, name: str, what: str, revision: str) -> None:
        repository = self._readable(name)
        if repository is None:
            return
        commit = repository.at(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        elif what == "tree":
            entries = [{"type": "file", "path": p, "size": len(b), "oid": _oid(b)} for p, b in commit[1].items()]
            self._answer(200, entries)
        else:
            siblings = [{"rfilename": path} for path in commit[1]]
            self._answer(200, {"_id": "1", "id": name, "sha": commit[0], "private": False, "siblings": siblings})

    def _download(self, name: str, revision: str, path: str) -> None:
        repository = self._readable(name)
        if repository is None:
            return
        commit = repository.at(revision)
        if commit is None or path not in commit[1]:
            self._error(404, "EntryNotFound" if commit else "RevisionNotFound")
            return
        content = commit[1][path]
        headers = {"ETag": f'"{_oid(content)}"', "X_Repo_Commit": commit[0], "Accept_Ranges": "bytes"}
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted and self.command == "GET":
            start = int(wanted[1])
            self.hub.ranges.append(f"{path} from {start}")
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._answer(206, content[start:], **headers)
        elif self.hub.cut_after is not None and self.command == "GET" and len(content) > self.hub.cut_after:
            self.send_response(200)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content[: self.hub.cut_after])
            self.wfile.flush()
            self.hub.cut_after = None
            self.close_connection = True
        else:
            self._answer(200, content, **headers)

    def do_PUT(self) -> None:
        content = self._body()
        if self.hub.full:
            self._error(400, "NoSpace")
            return
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._answer(200)

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.asked.append(f"POST {path}")
        if not self._logged_in():
            self._error(401, "Unauthorized")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"actions": {"upload": {"href": f"{self.hub.address}/objects"}}}
            objects = [{**entry, **upload} for entry in json.loads(body)["objects"]]
            self._answer(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            large = (".safetensors", ".harp")
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(large) else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": modes})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(200, {})

    def _create(self, wanted: dict[str, Any]) -> None:
        owner = wanted.get("organization") or "me"
        if owner not in ("me", "team"):
            self._error(403, "Forbidden")
            return
        name = f"{owner}/{wanted['name']}"
        address = {"url": f"{self.hub.address}/{name}"}
        if name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo", **address})
            return
        self.hub.repositories[name] = Repository(
            "private" in (wanted.get("visibility"), *wanted) and wanted.get("private", True)
        )
        self._answer(200, {**address, "name": name, "id": name})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        sha = self.hub.commit(name, files)
        address = f"{self.hub.address}/{name}/commit/{sha}"
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": address, "hookOutput": ""})


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers on this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
