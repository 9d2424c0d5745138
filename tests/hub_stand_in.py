"""A stand-in of the Hub's HTTP interface on this machine, for the real client: repositories,
commits with files and large files, and their download.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_of_the_owner"


@dataclass
class Repository:
    """What is in a repository, and which of it are large files."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)  # that are stated, if they are lies
    hashes: dict[str, str] = field(default_factory=dict)  # likewise
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits}".encode()).hexdigest()


@dataclass
class Hub:
    """The state of the stand-in.

    Args:
        url: Where it listens.
        repositories: By owner/name.
        uploads: Large files by their SHA-256.
        requests: What it was asked, in order.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


@contextmanager
def served() -> Iterator[Hub]:
    """Serve an empty Hub on a free port of this machine."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _path(self) -> list[str]:
        self.state.requests.append(f"{self.command} {self.path}")
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    @property
    def _owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        found = self.state.repositories.get(name)
        if found is None or (found.private and not self._owner):
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if not self._owner:
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == ["api", "validate-yaml"]:
            front = json.loads(body)["content"].split("---")[1]
            fine = yaml.safe_load(front)["library_name"] == "coterie"
            self._answer({"errors": [], "warnings": []}, 200 if fine else 400)
        elif path == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif path[:2] == ["api", "models"] and path[4] == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif path[-2:] == ["objects", "batch"]:
            objects = [
                {**own, "actions": {"upload": {"href": f"{self.state.url}/upload/{own['oid']}"}}}
                for own in json.loads(body)["objects"]
            ]
            self._answer(
                {"transfer": "basic", "objects": objects},
                headers={"Content-Type": "application/vnd.git-lfs+json"},
            )
        elif path[:2] == ["api", "models"] and path[4] == "commit":
            self._commit("/".join(path[2:4]), body)
        else:
            self._answer({"error": f"unknown: {self.path}"}, 400)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'ann'}/{asked['name']}"
        if name in self.state.repositories:
            self._answer({"error": "exists", "url": f"{self.state.url}/{name}"}, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.state.repositories[name] = Repository(private)
        self._answer({"url": f"{self.state.url}/{name}", "name": name})

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.state.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.state.uploads[value["oid"]]
                repository.large.add(value["path"])
        repository.commits += 1
        url = f"{self.state.url}/{name}/commit/{repository.sha}"
        self._answer({"commitUrl": url, "commitOid": repository.sha, "success": True})

    def do_PUT(self) -> None:
        oid, body = self._path()[-1], self._body()
        assert hashlib.sha256(body).hexdigest() == oid
        self.state.uploads[oid] = body
        self._answer({})

    def do_GET(self) -> None:
        path = self._path()
        if path == ["api", "whoami-v2"]:
            self._answer({"name": "ann", "type": "user", "orgs": []})
        elif path[:2] == ["api", "models"]:
            if found := self._repository("/".join(path[2:4])):
                self._answer(self._about("/".join(path[2:4]), found))
        elif len(path) > 4 and path[2] == "resolve":
            if found := self._repository("/".join(path[:2])):
                self._file(found, "/".join(path[4:]))
        else:
            self._answer({"error": f"unknown: {self.path}"}, 404)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _about(self, name: str, repository: Repository) -> dict[str, Any]:
        siblings = []
        for path, content in repository.files.items():
            size = repository.sizes.get(path, len(content))
            entry: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "b" * 40}
            if path in repository.large:
                digest = repository.hashes.get(path, hashlib.sha256(content).hexdigest())
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(entry)
        return {
            "id": name,
            "sha": repository.sha,
            "private": repository.private,
            "siblings": siblings,
            "tags": [],
        }

    def _file(self, repository: Repository, path: str) -> None:
        if path not in repository.files:
            self._answer({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.files[path]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": repository.sha,
            "X-Linked-Size": str(len(content)),
            "Content-Type": "application/octet-stream",
        }
        self._answer(content, headers=headers)
