"""Every block of code in README and docs runs, on a Hub of this machine whose tiny Llama has the real one's name."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import USER

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO / "tests" / "conversion"))
from folders import make_speaking_llama  # noqa: E402

FILES = [REPO / "README.md", *sorted(REPO.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
ELSEWHERE = ("pip install ", "make ")  # continuous integration installs, and runs what make has
SMALLER = {"bench": ["--length", "8", "--new-tokens", "2", "--rounds", "1"]}  # the same command, in seconds
# All blocks of a file in one process: importing takes most of the time of one of its own.
RUN = """
import json, sys
from typer.testing import CliRunner
from conversion_iha.cli import app

for command in json.loads(sys.argv[1]):
    print(command)
    if isinstance(command, str):
        exec(command, {"__name__": "__main__"})
    else:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
"""


def commands(text):
    for language, code in BLOCK.findall(text):
        assert language in ("bash", "python"), language
        if language == "python":
            yield code
            continue
        for line in code.splitlines():
            line = line.partition("  #")[0].partition(" #")[0].strip()
            if line and not line.startswith(ELSEWHERE):
                program, name, *arguments = _split(line)
                assert program == "iha", line
                yield [name, *arguments, *SMALLER.get(name, [])]


def _split(line):
    return [part.replace("my-name", USER).strip('"') for part in re.findall(r'"[^"]*"|\S+', line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if BLOCK.search(file.read_text())], ids=lambda file: file.name
)
def test_every_block_runs(file, hub, smollm2, tmp_path):
    llama = make_speaking_llama(tmp_path / "llama", smollm2)
    (llama / "README.md").write_text("---\nlicense: llama3.2\n---\nNot the real one.")
    hub.commits["meta-llama/Llama-3.2-1B"] = [{path.name: hub.keep(path.read_bytes()) for path in llama.glob("*.*")}]
    blocks = list(commands(file.read_text()))
    assert blocks
    if not any("llama-iha" in block for block in blocks if block[0] == "convert"):  # it goes on where README ends
        blocks.insert(0, ["convert", "meta-llama/Llama-3.2-1B", "llama-iha", "--no-check"])
    (tmp_path / "here").mkdir()
    environment = hub.environment(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(blocks)],
        env=environment,
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_links_lead_somewhere():
    for file in [*FILES, *REPO.glob("*.md"), *REPO.glob("examples/*/README.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
            if not link.startswith(("http", "#")):
                assert (file.parent / link.partition("#")[0]).exists(), f"{file}: {link}"
        for name, anchor in re.findall(r"\]\(([^)\s#]*\.md)?#([\w-]+)\)", file.read_text()):
            text = (file.parent / name if name else file).read_text()
            titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor
