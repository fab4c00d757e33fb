"""The commands for real: SmolLM2 and its conversion score alike; a run that was killed ends as one that was not."""

import json
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from runs import ENVIRONMENT, EXAMPLES, run_here
from transformers import AutoTokenizer, __version__

from conversion_iha import convert


def command(model, folder, data, *more, program="after_sft.py"):
    settings = ("--tasks", "gsm8k", "--data", data, "--batch_size", "4")
    return [sys.executable, EXAMPLES / "evaluation" / program, model, "--output_dir", folder, *settings, *more]


def texts(folder):
    lines = [line for path in (folder / "generations").glob("*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    assert len({tuple(record["key"]) for record in records}) == len(records)
    return {tuple(record["key"]): record["text"] for record in records}


@pytest.fixture(scope="module")
def converted(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "model-iha"
    convert(smollm2, folder, 2, link=True)
    return folder


@pytest.mark.slow
def test_a_model_and_its_conversion_score_alike(smollm2, converted, data, tmp_path, capsys):
    options = ("--limit", "2", "--samples", "2", "--max_new_tokens", "16", "--dtype", "float32")
    run_here(command(smollm2, tmp_path / "llama", data, *options))
    run_here(command(converted, tmp_path / "iha", data, *options, "--baseline", tmp_path / "llama"))
    said = capsys.readouterr().out
    mine, theirs = texts(tmp_path / "iha"), texts(tmp_path / "llama")
    assert len(mine) == 4 and mine == theirs and all(text.strip() for text in mine.values())
    assert mine["gsm8k_sampled", 0, 0] != mine["gsm8k_sampled", 0, 1]  # samples, not copies
    assert "(+0.0) |" in said
    results = json.loads((tmp_path / "iha" / "results.json").read_text())
    assert results["versions"]["transformers"] == __version__
    assert results["problems"] == {"gsm8k": 2} and set(results["scores"]["gsm8k"]) == {"P@1", "Maj@2"}
    assert (tmp_path / "iha" / "results.md").read_text() in said
    assert (tmp_path / "iha" / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_they_score_alike_before_fine_tuning(smollm2, converted, data, tmp_path, capsys):
    options = ("--limit", "1", "--samples", "1", "--max_new_tokens", "8", "--dtype", "float32", "--allow_code")
    options += ("--tasks", "math500", "humaneval")
    for model, name in ((smollm2, "llama"), (converted, "iha")):
        run_here(command(model, tmp_path / name, data, *options, program="pretrained.py"))
    mine, theirs = texts(tmp_path / "iha"), texts(tmp_path / "llama")
    assert mine == theirs and all(text.strip() for text in mine.values())
    assert sorted(mine) == [
        ("humaneval_few_shot", 0, 0),
        ("math500_few_shot", 0, 0),
        ("math500_few_shot_voted", 0, 0),
    ]
    of_iha, of_llama = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("iha", "llama"))
    assert of_iha["scores"] == of_llama["scores"]
    assert {task: list(scores) for task, scores in of_iha["scores"].items()} == {
        "math500": ["EM", "Maj@1"],
        "humaneval": ["P@1"],
    }
    assert "before fine-tuning, 1 samples" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_texts(small, data, tmp_path):
    options = ("--limit", "3", "--samples", "4", "--max_new_tokens", "32")
    run_here(command(small, tmp_path / "whole", data, *options))
    whole = texts(tmp_path / "whole")
    assert len(whole) == 12

    folder = tmp_path / "killed"
    file = folder / "generations" / "0.jsonl"
    going = list(map(str, command(small, folder, data, *options)))
    started = psutil.Popen(going, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while not (file.exists() and file.read_bytes().count(b"\n")):
        assert started.poll() is None
        time.sleep(0.001)
    started.kill()
    started.wait()
    assert not (folder / "results.json").exists()
    lines = file.read_bytes().splitlines(keepends=True)[:4]
    file.write_bytes(b"".join(lines) + lines[0][:20])  # as if it had been killed in the middle of a line
    run_here(going)
    assert texts(folder) == whole
    assert file.read_bytes().startswith(b"".join(lines))
    ends = [json.loads((it / "results.json").read_text()) for it in (folder, tmp_path / "whole")]
    assert ends[0] == ends[1]

    shutil.copytree(small, tmp_path / "another")
    (tmp_path / "another" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"holds samples of another model.* Name another --output_dir"):
        run_here(command(tmp_path / "another", folder, data, *options))


def test_what_a_checkpoint_generates_by_default_is_left_out(small, data, tmp_path):
    for name, own in (("without", {}), ("with", {"max_new_tokens": 3, "repetition_penalty": 5.0, "min_p": 0.9})):
        shutil.copytree(small, tmp_path / name)
        file = tmp_path / name / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
        options = ("--limit", "1", "--samples", "2", "--max_new_tokens", "8")
        run_here(command(tmp_path / name, tmp_path / f"{name} results", data, *options))
    assert texts(tmp_path / "with results") == texts(tmp_path / "without results")


def test_prompts_are_never_cut(small, data, tmp_path):
    with pytest.raises(
        ValueError, match=r"--max_new_tokens 2040: with a prompt of \d+ tokens it is more than the 2048"
    ):
        run_here(command(small, tmp_path / "out", data, "--limit", "1", "--max_new_tokens", "2040"))


def test_a_model_without_a_chat_template_is_refused(small, data, tmp_path):
    shutil.copytree(small, tmp_path / "plain")
    for path in (tmp_path / "plain").glob("chat_template*"):
        path.unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(SystemExit, match="its tokenizer has no chat template"):
        run_here(command(tmp_path / "plain", tmp_path / "out", data))
    assert not (tmp_path / "out").exists()
