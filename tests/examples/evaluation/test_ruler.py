"""The command: exact scores of scripted answers, what it writes and refuses, and SmolLM2 beside its conversion."""

import json
import shutil
import sys
from statistics import mean

import pytest
from generations import SavingLM
from lm_eval.api.model import LM
from ruler import LongLM, Samples, evaluate, parse
from ruler_files import write_data
from ruler_tables import markdown, read_baseline, summaries, write
from ruler_tasks import MULTI_KEY, TASKS, Prompts
from runs import EXAMPLES, run_here
from tokenizers import processors
from transformers import AutoTokenizer

from conversion_iha import convert


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("ruler"))


def command(model, folder, *more):
    program = EXAMPLES / "evaluation" / "ruler.py"
    return [sys.executable, program, model, "--output_dir", folder, *more]


def records(folder):
    lines = [line for path in (folder / "generations").glob("*.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    assert len({tuple(record["key"]) for record in found}) == len(found)
    return {tuple(record["key"]): record["text"] for record in found}


class Scripted(LM):
    """Named mock: a model that says what is written for each task and sample, one process of several."""

    def __init__(self, texts, rank=0, world_size=1):
        super().__init__()
        self.texts, self._rank, self._world_size = texts, rank, world_size
        self.asked = []

    def generate_until(self, requests):
        self.asked += [(request.task_name, request.doc_id) for request in requests]
        for request in requests:
            assert request.args[1] == {
                "until": [],
                "do_sample": False,
                "max_gen_toks": 128 if "niah" in request.task_name else 32,
            }
        return [self.texts[request.task_name][request.doc_id] for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def test_scripted_answers_have_the_scores_of_hand(tokenizer, data):
    samples = Samples(["niah_multivalue", "qa_squad"], data, 0, Prompts(tokenizer))
    _, first = samples(("niah_multivalue", 2048), 0)
    _, second = samples(("niah_multivalue", 2048), 1)
    answers = [samples(("qa_squad", 2048), index)[1] for index in range(4)]
    texts = {
        "niah_multivalue_2048": [f"{first[2]} and {first[0]}.", " ".join(second), "none", "none"],  # 2 of 4, 4 of 4
        "qa_squad_2048": [answers[0][1], f"\x07it is {answers[1][0].upper()}!", "I do not know.", answers[0][0]],
    }
    cells = [("niah_multivalue", 2048), ("qa_squad", 2048)]
    found = evaluate(Scripted(texts), cells, samples, 4)
    assert found == {cells[0]: (0.5 + 1 + 0 + 0) / 4, cells[1]: (1 + 1 + 0 + 0) / 4}


@pytest.mark.parametrize(
    ("task", "text", "outputs", "score"),
    [
        ("vt", "ABCDE, FGHIJ", ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], 2 / 5),
        (
            "cwe",
            "1. Cat 2. dog 3. ad hoc",
            ["cat", "dog", "ad hoc", "cow", "bat", "owl", "emu", "ant", "bee", "ape"],
            3 / 10,
        ),
        ("fwe", "qwerty\nasdfgh and zxcvbn", ["qwerty", "asdfgh", "zxcvbn"], 1),
        ("niah_single_1", "It is 1234567.", ["1234567"], 1),
        ("niah_single_1", "It is 123456.", ["1234567"], 0),
        ("niah_multiquery", "1, 2", ["1", "2", "3", "4"], 0.5),
        ("qa_hotpot", "yes, they are", ["Yes"], 1),
        ("qa_squad", "in the north", ["north", "the north", "northern France"], 1),
        ("qa_squad", "", ["north"], 0),
    ],
)
def test_scores(task, text, outputs, score):
    assert TASKS[task].score(text, outputs) == pytest.approx(score)


def test_processes_share_the_samples(tokenizer, data):
    samples = Samples(["niah_single_1"], None, 0, Prompts(tokenizer))
    shares = [Scripted({"niah_single_1_512": ["?"] * 5}, rank, 3) for rank in range(3)]
    for model in shares:
        assert evaluate(model, [("niah_single_1", 512)], samples, 5) == {("niah_single_1", 512): 0}
    asked = [[index for _, index in model.asked] for model in shares]
    assert asked == [[0, 3], [1, 4], [2]]


def scores_of(value):
    return {task: {"4096": value, "16384": value / 2} for task in TASKS}


def test_tables_have_means_and_differences(tmp_path, capsys):
    scores = scores_of(0.5)
    scores["vt"] = {"4096": 1.0, "16384": 0.25}
    for task, value in zip(MULTI_KEY, (0.9, 0.6, 0.3), strict=True):
        scores[task] = {"4096": value, "16384": 0.1}
    settings = {"samples": 8, "seed": 0, "apply_chat_template": False}
    found = summaries(scores)
    assert found["mean of 13 tasks"]["4096"] == pytest.approx((9 * 0.5 + 1.0 + 0.9 + 0.6 + 0.3) / 13)
    assert found["multi-key"] == {"4096": pytest.approx(0.6), "16384": pytest.approx(0.1)}
    (tmp_path / "llama").mkdir()
    write(tmp_path / "llama", {"model": "llama", **settings, "scores": scores_of(0.4)}, None)
    wanted = {**settings, "tasks": list(TASKS), "lengths": [4096, 16384]}
    baseline = read_baseline(tmp_path / "llama", wanted)
    write(tmp_path, {"model": "iha", **settings, "scores": scores}, baseline)
    text = (tmp_path / "results.md").read_text()
    assert text in capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "| mean of 13 tasks | 4096 | 16384 | average |"
    assert lines[2] == "| llama | 40.0 | 20.0 | 30.0 |"
    assert lines[5:7] == ["| multi-key | 4096 | 16384 | average |", "| --- | --- | --- | --- |"]
    assert lines[8] == "| iha | 60.0 (+20.0) | 10.0 (-10.0) | 35.0 (+5.0) |"
    assert "| vt | 100.0 (+60.0) | 25.0 (+5.0) | 62.5 (+32.5) |" in lines
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["scores"] == scores and results["means"] == found and results["samples"] == 8
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")
    two = {task: scores[task] for task in ("vt", "fwe")}
    assert "multi-key" not in markdown({"iha": two}, settings)  # not all three are there
    for name, value, message in (
        ("samples", 9, "samples 8, here 9"),
        ("seed", 1, "seed 0, here 1"),
        ("apply_chat_template", True, "apply_chat_template False, here True"),
        ("lengths", [4096, 8192], "has no niah_single_1 at 8192 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            read_baseline(tmp_path / "llama", {**wanted, name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "qa_nothing"], "invalid choice: 'qa_nothing'"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--baseline", "nowhere"], "holds no results.json"),
    ],
)
def test_commands_that_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(["model", "--output_dir", "out", *arguments])
    assert message in capsys.readouterr().err


def test_what_cannot_run_is_refused_before_the_model_is_loaded(small, data, tmp_path):
    shutil.copytree(small, tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").unlink()
    for path in (tmp_path / "plain").glob("chat_template*"):
        path.unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    for options, message in (
        (
            ["--lengths", "1024", "4096"],
            r"--lengths 4096: more than the max_position_embeddings of .*, which are 2048",
        ),
        (["--lengths", "2048", "--data", tmp_path], r"PaulGrahamEssays\.json: not there"),
        (["--lengths", "2048", "--apply_chat_template"], "the tokenizer of .* has no chat template"),
        (["--lengths", "512", "--tasks", "vt"], "--lengths 512: too short for vt"),
        (["--lengths", "2048", "--tasks", "qa_squad", "--data", data], "--samples 500: there are 319 questions"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_here(command(tmp_path / "plain", tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_where_it_was_stopped(small, data, tmp_path, monkeypatch):
    options = ("--tasks", "fwe", "qa_squad", "--data", data, "--lengths", "512", "768", "--samples", "3")
    run_here(command(small, tmp_path / "whole", *options))
    whole = records(tmp_path / "whole")
    assert len(whole) == 12
    shutil.copytree(tmp_path / "whole" / "generations", tmp_path / "stopped" / "generations")
    file = tmp_path / "stopped" / "generations" / "0.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
    asked = []
    generate = SavingLM.__bases__[0].generate_until
    monkeypatch.setattr(
        SavingLM.__bases__[0],
        "generate_until",
        lambda self, requests, **kwargs: asked.extend(requests) or generate(self, requests, **kwargs),
    )
    run_here(command(small, tmp_path / "stopped", *options))
    assert len(asked) == 5 and records(tmp_path / "stopped") == whole
    for name in ("results.json", "results.md"):
        assert (tmp_path / "stopped" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert (tmp_path / "stopped" / "ruler.png").exists()
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert [(task, list(its)) for task, its in results["scores"].items()] == [
        ("fwe", ["512", "768"]),
        ("qa_squad", ["512", "768"]),
    ]


def test_tokens_are_counted_as_the_model_gets_them(small, tmp_path):
    """lm-eval adds a BOS where the tokenizer does, and none to a prompt that begins with it."""
    tokenizer = AutoTokenizer.from_pretrained(small)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    model = LongLM(tmp_path, 0, pretrained=str(small), tokenizer=tokenizer, batch_size=1, device="cpu", max_length=512)
    for chat in (False, True):
        prompts = Prompts(tokenizer, chat)
        prompt, _ = Samples(["fwe"], None, 0, prompts)(("fwe", 512), 0)
        given, _ = model.tok_batch_encode([prompt])
        assert given.shape[1] == len(model.tok_encode(prompt)) == prompts.tokens(prompt)
        assert given[0].tolist().count(tokenizer.bos_token_id) == (3 if chat else 1)  # <|im_start|> of three turns


@pytest.mark.slow
def test_a_model_and_its_conversion_answer_alike(smollm2, tmp_path, capsys):
    convert(smollm2, tmp_path / "model-iha", 2, link=True)
    options = (
        "--tasks",
        "niah_single_1",
        "niah_multikey_2",
        "--lengths",
        "320",
        "--samples",
        "1",
        "--dtype",
        "float32",
    )
    run_here(command(smollm2, tmp_path / "llama", *options))
    run_here(command(tmp_path / "model-iha", tmp_path / "iha", *options, "--baseline", tmp_path / "llama"))
    said = capsys.readouterr().out
    mine, theirs = records(tmp_path / "iha"), records(tmp_path / "llama")
    assert len(mine) == 2 and mine == theirs and all(text.strip() for text in mine.values())
    scores = [json.loads((tmp_path / name / "results.json").read_text())["scores"] for name in ("iha", "llama")]
    assert scores[0] == scores[1] and mean(scores[0][task]["320"] for task in scores[0]) > 0
    assert "(+0.0) |" in said and (tmp_path / "iha" / "results.md").read_text() in said
