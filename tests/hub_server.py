"""
A Hub on this machine, in a folder: what huggingface_hub's own client needs to create, push to and load repositories.
Large files go the way of LFS (Xet's needs a storage service of its own: clients here turn it off).
"""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

USER, TOKEN = "tester", "hf_test"
LFS = (".safetensors", ".bin", ".pt", ".gguf")


class Hub:
    """
    Models of one user. `commits[repo]` are the repository's states, oldest first: file names and the sha256 of their
    contents, which lie under `folder`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.commits: dict[str, list[dict[str, str]]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a process that takes this for the Hub, as its user; `home` is its cache."""
        names = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        return {**os.environ, **names, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def keep(self, content: bytes) -> str:
        oid = hashlib.sha256(content).hexdigest()
        (self.folder / oid).write_bytes(content)
        return oid

    def read(self, repo: str, name: str) -> bytes:
        return (self.folder / self.commits[repo][-1][name]).read_bytes()

    def state(self, repo: str, revision: str) -> tuple[str, dict[str, str]] | None:
        """The commit that a branch or sha names, and its files."""
        states = self.commits.get(repo, [])
        if revision == "main" and states:
            return _sha(repo, len(states) - 1), states[-1]
        return next(((_sha(repo, i), files) for i, files in enumerate(states) if _sha(repo, i) == revision), None)


def _sha(repo: str, index: int) -> str:
    return hashlib.sha1(f"{repo} {index}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            return self.say({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path):
            repo, kind, revision = match.groups()
            if not (state := self.hub.state(repo, revision or "main")):
                return self.refuse(404, "RepoNotFound")
            sha, files = state
            if kind == "tree":
                sizes = {name: (self.hub.folder / oid).stat().st_size for name, oid in files.items()}
                return self.say([{"type": "file", "path": n, "size": s, "oid": files[n]} for n, s in sizes.items()])
            siblings = [{"rfilename": name} for name in files]
            return self.say({"id": repo, "sha": sha, "siblings": siblings, "private": False, "tags": []})
        if match := re.fullmatch(r"/([\w-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, name = match.groups()
            if not (state := self.hub.state(repo, revision)):
                return self.refuse(404, "RepoNotFound")
            sha, files = state
            if name not in files:
                return self.refuse(404, "EntryNotFound", sha)
            content = (self.hub.folder / files[name]).read_bytes()
            return self.answer(200, content, {"ETag": f'"{files[name]}"', "X-Repo-Commit": sha})
        return self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        path, body = unquote(urlsplit(self.path).path), self.body()
        if path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Unauthorized")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization'] or USER}/{asked['name']}"
            there = repo in self.hub.commits
            self.hub.commits.setdefault(repo, [{}])
            return self.say({"url": f"{self.hub.url}/{repo}"}, 409 if there else 200)
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(LFS) else "regular" for name in names}
            return self.say(
                {"files": [{"path": name, "uploadMode": modes[name], "shouldIgnore": False} for name in names]}
            )
        if re.fullmatch(r"/([\w-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            upload = {"actions": {"upload": {"href": f"{self.hub.url}/lfs"}}}
            known = [(asked, (self.hub.folder / asked["oid"]).exists()) for asked in json.loads(body)["objects"]]
            objects = [asked if there else {**asked, **upload} for asked, there in known]
            return self.say({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)/commit/main", path):
            return self.commit(match[1], [json.loads(line) for line in body.splitlines()])
        return self.refuse(404, "RepoNotFound")

    def do_PUT(self):
        self.hub.keep(self.body())
        self.answer(200, b"")

    def commit(self, repo: str, lines: list[dict]):
        files = dict(self.hub.commits[repo][-1])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = self.hub.keep(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile" and (self.hub.folder / value["oid"]).exists():
                files[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return self.refuse(400, "BadRequest")
        self.hub.commits[repo].append(files)
        sha = _sha(repo, len(self.hub.commits[repo]) - 1)
        self.say({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def say(self, value, status: int = 200):
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, sha: str | None = None):
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self.answer(status, b"", headers | ({"X-Repo-Commit": sha} if sha else {}))

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
