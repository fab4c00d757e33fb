"""RULER's prompts: their length, and that what reads them alone finds the answer, with three tokenizers."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import lm_eval
import pytest
import ruler_material
import ruler_tasks
from ruler_files import LICENCES, NAMES, write_data
from ruler_material import ESSAYS, HOTPOT, SQUAD, Question, Questions, load
from ruler_tasks import MULTI_KEY, TASKS, Prompts, make
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LENGTHS = (2048, 4096, 8192, 16384)
SAMPLES = 1  # of each task, tokenizer and length; raise it for a longer check
FILES = Path(lm_eval.__file__).parent / "tasks" / "ruler"


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp("ruler"))
    return {None: None, **{name: load(name, folder) for name in (ESSAYS, SQUAD, HOTPOT)}}


@pytest.fixture(scope="session")
def tokenizers(tokenizer):
    """SmolLM2's, a byte-level BPE that begins with a BOS, and a WordPiece, the two trained on licence texts."""
    texts = [str(LICENCES / name) for name in NAMES]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(texts, trainers.BpeTrainer(vocab_size=4000, special_tokens=["<s>"], initial_alphabet=alphabet))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.train(texts, trainers.WordPieceTrainer(vocab_size=3000, special_tokens=["[UNK]", "[SEP]"]))
    return {
        "SmolLM2": tokenizer,
        "BPE": PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>"),
        "WordPiece": PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]", eos_token="[SEP]"),
    }


def read_needles(prompt):
    question = prompt.rpartition("What ")[2]
    keys = re.search(r"for (.+?) mentioned", question)[1]
    needle = r"One of the special magic \w+ for {} is: (\S+)\."
    return [
        value for key in re.split(r", (?:and )?", keys) for value in re.findall(needle.format(re.escape(key)), prompt)
    ]


def read_chain(prompt):
    text = prompt.rpartition("Memorize and track")[2]
    held = {}
    for name, value in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text):
        held[name] = held.get(value, value)
    wanted = re.findall(r"assigned the value (\d+)", text)[-1]
    return [name for name, value in held.items() if value == wanted]


def read_common(prompt):
    shown, _, asked = prompt.rpartition("Below is a numbered list")
    first, second = (Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\nQ)", text)) for text in (shown, asked))
    answer = re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", shown.rpartition("in the list are:")[2])
    assert len(answer) == 10 and {word for word, _ in first.most_common(10)} == set(answer)  # the example
    return [word for word, _ in second.most_common(10)]


def read_frequent(prompt):
    text = prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counts = Counter(word for word in text.split() if word != "...").most_common(4)
    assert counts[2][1] > counts[3][1]  # the third is one of three, not one of many
    return [word for word, _ in counts[:3]]


def read_documents(prompt):
    phrase = re.search(r"Which words follow “(.+)”", prompt)[1]
    after = prompt.partition(phrase)[2].split()
    return [" ".join(after[:3])]


def oracle(task):
    """What answers a task by its prompt alone."""
    if task.startswith("niah"):
        return read_needles
    others = {"vt": read_chain, "cwe": read_common, "fwe": read_frequent}
    return others.get(task, read_documents)


@pytest.mark.parametrize("name", ["SmolLM2", "BPE", "WordPiece"])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_length_and_hold_the_answer(task, name, tokenizers, material):
    prompts = Prompts(tokenizers[name])
    for length in LENGTHS:
        for index in range(SAMPLES):
            prompt, outputs = make(task, length, index, 0, prompts, material[TASKS[task].needs])
            tokens = len(tokenizers[name](prompt).input_ids) + TASKS[task].budget
            assert 0.95 * length <= tokens <= length
            found = oracle(task)(prompt)
            if TASKS[task].any_of:
                assert found[0] in outputs
            else:
                assert sorted(found) == sorted(outputs)
            assert TASKS[task].score("\n".join(found), outputs) == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_own_seed_alone(task, tokenizers, material):
    def sample(index, seed=0, length=2048):
        return make(task, length, index, seed, Prompts(tokenizers["SmolLM2"]), material[TASKS[task].needs])

    random.seed(1)
    state = random.getstate()
    expected = sample(2)
    assert random.getstate() == state
    random.seed(2)
    sample(0)
    assert sample(2) == expected
    assert len({expected[0], sample(2, seed=1)[0], sample(3)[0], sample(2, length=2100)[0]}) == 4


def test_samples_are_the_same_everywhere():
    """Values, not properties: another Python or another process must draw these."""
    assert [
        TASKS[task].write(random.Random(f"0 {task} 4096 0"), 73, 4096, 0, None).outputs
        for task in ("fwe", "niah_multikey_2")
    ] == [
        ["cefiyn", "vpfzly", "ovormn"],
        ["7133626"],
    ]


def test_shapes_are_those_of_the_paper(tokenizers, material):
    prompt = {
        task: make(task, 4096, 0, 0, Prompts(tokenizers["SmolLM2"]), material[TASKS[task].needs])[0] for task in TASKS
    }
    needles = {task: re.findall(r"special magic (\w+) for (\S+) is: (\S+)\.", text) for task, text in prompt.items()}
    counts = {task: len(needles[task]) for task in TASKS if task.startswith("niah")}
    assert {task for task, count in counts.items() if count == 1} == {f"niah_single_{i}" for i in (1, 2, 3)}
    assert {task for task, count in counts.items() if count == 4} == {
        "niah_multikey_1",
        "niah_multivalue",
        "niah_multiquery",
    }
    assert counts["niah_multikey_2"] > 100 and counts["niah_multikey_3"] > 40
    assert {len({key for _, key, _ in needles[task]}) for task in ("niah_multikey_1", "niah_multiquery")} == {4}
    assert len({key for _, key, _ in needles["niah_multivalue"]}) == 1
    kinds = {task: {kind for kind, _, _ in found} for task, found in needles.items() if found}
    assert {task for task, kind in kinds.items() if kind == {"uuids"}} == {"niah_single_3", "niah_multikey_3"}
    common = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\nQ)", prompt["cwe"].rpartition("Below is")[2]))
    assert sorted(set(common.values())) == [3, 30] and list(common.values()).count(30) == 10
    text = prompt["fwe"].partition("coded words. ")[2].partition("\nQuestion")[0].split()
    assert Counter(text).most_common(1)[0] == ("...", pytest.approx(0.61 * len(text), rel=0.1))
    assert prompt["vt"].count(" VAR ") > 9 and prompt["vt"].count("Memorize and track") == 2
    assert {TASKS[task].budget for task in counts} == {128}
    assert [TASKS[task].budget for task in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot")] == [30, 120, 50, 32, 32]
    assert set(MULTI_KEY) < set(TASKS) and len(TASKS) == 13


def test_needles_lie_anywhere(tokenizers, material):
    def depth(index):
        prompt, (value,) = make("niah_single_2", 2048, index, 0, Prompts(tokenizers["SmolLM2"]), material[ESSAYS])
        return prompt.index(value) / len(prompt)

    depths = [depth(index) for index in range(40)]
    assert min(depths) < 0.15 and max(depths) > 0.85 and len(set(depths)) > 20


def test_wording_is_the_harness_s():
    source = (FILES / "prepare_niah.py").read_text()
    assert f'f"{ruler_tasks.PREFIX}"' in source
    written = ruler_tasks.needles(random.Random(0), 5, 4096, 0, None, haystack="repeat")
    assert f"{written.prefix} ".startswith("The special magic number for ")
    assert written.prefix.endswith(" mentioned in the provided text is")
    with pytest.raises(LookupError, match="has no NOTHING: install lm_eval"):
        ruler_material.wording("niah_utils", "NOTHING")


def test_a_chat_template_counts(tokenizers, material):
    tokenizer = tokenizers["SmolLM2"]
    prompt, outputs = make("niah_multikey_1", 2048, 0, 0, Prompts(tokenizer, chat=True), material[ESSAYS])
    assert prompt.startswith("<|im_start|>system\n") and "<|im_start|>user\nA special magic number is" in prompt
    assert re.search(
        r"<\|im_start\|>assistant\nThe special magic number for \S+ mentioned in the provided text is$", prompt
    )
    assert 0.95 * 2048 <= len(tokenizer(prompt).input_ids) + 128 <= 2048
    assert read_needles(prompt) == outputs


def test_what_cannot_be_made_is_refused(tokenizers, material):
    prompts = Prompts(tokenizers["SmolLM2"])
    with pytest.raises(ValueError, match=r"--lengths 512: too short for cwe, which needs \d+ tokens or more"):
        make("cwe", 512, 0, 0, prompts, None)
    few = Questions(material[SQUAD].documents[:9], [Question("Who?", ["I"], [0], [1, 2])])
    with pytest.raises(ValueError, match=r"--lengths 16384: qa_squad has words or documents for \d+ tokens only"):
        make("qa_squad", 16384, 0, 0, prompts, few)
    with pytest.raises(ValueError, match=r"--samples 10000: there are \d+ questions"):
        make("qa_hotpot", 2048, 9999, 0, prompts, material[HOTPOT])


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"PaulGrahamEssays\.json: not there\. It is .*NVIDIA/RULER.* --data"):
        load(ESSAYS, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"dev-v2\.0\.json: not there\. .*https://rajpurkar"):
        load(SQUAD, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"PaulGrahamEssays\.json: could not be fetched\. It is .* --data"):
        load(ESSAYS, None)  # tests are offline
    for name, broken in ((ESSAYS, {"text": ""}), (SQUAD, {"data": [{"title": "x"}]}), (HOTPOT, [{"question": "?"}])):
        (tmp_path / name).write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: cannot be read: .* Put a copy named"):
            load(name, tmp_path)


def test_questions_are_read_as_published(material):
    squad, hotpot = material[SQUAD], material[HOTPOT]
    assert not any("Hamlet" in question.text for question in squad.questions)  # it has no answer
    assert all(question.answers[0] in squad.documents[question.own[0]] for question in squad.questions)
    assert all(len(question.answers) == 2 and len(question.own) == 1 for question in squad.questions)
    assert all(len(question.own) == 10 for question in hotpot.questions)
    assert re.match(r"GPL-3, part 0\n\S", hotpot.documents[hotpot.questions[0].own[0]])
    related = squad.questions[0].related
    assert related and squad.questions[0].own[0] not in related


def test_documents_of_the_same_article_come_first(tokenizers, material):
    prompt, _ = make("qa_squad", 2048, 0, 0, Prompts(tokenizers["SmolLM2"]), material[SQUAD])
    asked = material[SQUAD].questions[0]
    article = {material[SQUAD].documents[i] for i in [*asked.own, *asked.related]}
    shown = re.split(r"\n\nDocument \d+:\n|\n\nAnswer the question", prompt)[1:-1]
    assert len(shown) > 5 and all(document in article for document in shown)
