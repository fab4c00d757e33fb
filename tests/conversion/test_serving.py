"""`iha serve` and `transformers chat` with a converted folder: real processes, real HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = [{"role": "user", "content": "What is the capital of France, and which river runs through it?"}]
NEW_TOKENS = 24
PATIENCE_S = 120


def environment(**changes) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000", **changes}


def post(url: str, body: dict):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    destination = tmp_path_factory.mktemp("serving") / "iha"
    command = [sys.executable, "-m", "conversion_iha.cli", "convert", smollm2, destination, "--link", "--no-check"]
    subprocess.run(command, check=True, env=environment())
    return destination


@pytest.fixture(scope="module")
def answer(folder):
    """The greedy answer of generate(), with the folder's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """The URL of a server of the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "conversion_iha.cli", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment()) as process,
    ):
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not is_up(url):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as response:
            return response.status == 200
    except OSError:
        return False


def test_a_completion_over_http_is_generates(server, folder, answer):
    body = {"model": str(folder), "messages": QUESTION, "temperature": 0, "max_tokens": NEW_TOKENS}
    with post(f"{server}/v1/chat/completions", body) as response:
        choice = json.load(response)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": answer}
    assert "Paris" in answer


def test_a_streamed_completion_is_the_same_in_pieces(server, folder, answer):
    body = {"model": str(folder), "messages": QUESTION, "temperature": 0, "max_tokens": NEW_TOKENS, "stream": True}
    with post(f"{server}/v1/chat/completions", body) as response:
        events = [json.loads(line.removeprefix(b"data: ")) for line in response if line.startswith(b"data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == answer
    assert len(pieces) > 5


@pytest.mark.slow
def test_chat_prints_the_answer(server, folder, answer):
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", folder, f"{server}/v1"]
    command += ["do_sample=False", f"max_new_tokens={NEW_TOKENS}"]
    # Offline, huggingface_hub's client refuses this machine's own server too.
    chat = environment(HF_HUB_OFFLINE="0", HF_HUB_DISABLE_UPDATE_CHECK="1")
    lines = f"{QUESTION[0]['content']}\nn\n!exit\n"
    run = subprocess.run(command, input=lines, capture_output=True, text=True, env=chat, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    assert " ".join(answer.split()) in " ".join(run.stdout.split())


@pytest.mark.slow
def test_transformers_serve_itself_knows_its_own_classes_only(folder):
    """Why `iha serve` is there: remote code or not."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--trust-remote-code"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S)
    assert run.returncode != 0
    assert "has no attribute IHAForCausalLM" in run.stderr
