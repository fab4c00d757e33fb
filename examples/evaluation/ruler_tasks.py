"""
RULER's 13 tasks (arXiv:2404.06654, appendices A and B): how a prompt is written, and what an answer is worth.

A sample is a function of its task, length, tokenizer, seed and index alone. What lm-eval 0.4.12 does otherwise is said
beside each task.
"""

import math
import re
import string
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from random import Random

from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all
from ruler_material import ESSAYS, HOTPOT, SQUAD, Questions, wording, words
from transformers import PreTrainedTokenizerBase

Material = list[str] | Questions | None
FULL = 0.98  # of the room: a prompt that fills so much of it is not made longer
LEAST = 0.95  # of the length: where all words or documents fill less, there are too few of them


@dataclass(frozen=True)
class Sample:
    """
    Args:
        input: what is asked.
        prefix: how the answer begins; it is a part of the prompt.
        outputs: what the answer has to hold.
    """

    input: str
    prefix: str
    outputs: list[str]


@dataclass(frozen=True)
class Task:
    """
    Args:
        write: a sample of (rng, size, length in tokens, index, material); it grows with its size.
        budget: tokens of an answer.
        unit: tokens that one more of size takes, roughly.
        needs: the material's name.
        smallest: the least size.
        largest: the most that the material has.
        any_of: one of the outputs is enough; otherwise the share of them counts.
    """

    write: Callable[[Random, int, int, int, Material], Sample]
    budget: int
    unit: float
    needs: str | None = None
    smallest: int = 1
    largest: Callable[[Material], int] = lambda material: 1 << 30
    any_of: bool = False

    def score(self, text: str, outputs: list[str]) -> float:
        """What an answer is worth, from 0 to 1; the case of letters does not matter."""
        (text,) = postprocess_pred([text])
        if self.any_of:  # lm-eval's string_match_part gives the share of the answers, as for the other tasks
            return float(any(output.lower() in text.lower() for output in outputs))
        return string_match_all([text], [outputs])


class Prompts:
    """
    Samples as prompts of a model.

    Args:
        tokenizer: the model's.
        chat: whether its chat template is applied; the prefix then begins the model's turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool = False):
        self.tokenizer, self.chat = tokenizer, chat

    def text(self, sample: Sample) -> str:
        if not self.chat:
            return f"{sample.input} {sample.prefix}"
        turns = [{"role": "user", "content": sample.input}, {"role": "assistant", "content": sample.prefix}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)

    def tokens(self, prompt: str) -> int:
        """How many the model is given; lm-eval adds no second BOS."""
        begun = self.tokenizer.bos_token is not None and prompt.startswith(self.tokenizer.bos_token)
        return len(self.tokenizer(prompt, add_special_tokens=not begun, verbose=False).input_ids)


def make(name: str, length: int, index: int, seed: int, prompts: Prompts, material: Material) -> tuple[str, list[str]]:
    """
    The prompt of a sample, and what its answer has to hold. Prompt and answer have `length` tokens, or a little less.

    lm-eval grows a prompt by 25 sentences or 10 documents at a time, so that niah_multikey_3 fills about half of 4,096
    tokens; and it draws from the global random state, so that a sample depends on all that were made before it.

    Raises:
        ValueError: the length is too short for the task, or the material too small for the length.
    """
    task = TASKS[name]
    room = length - task.budget
    largest = task.largest(material)

    def written(size: int) -> tuple[int, str, list[str]]:
        sample = task.write(Random(f"{seed} {name} {length} {index}"), size, length, index, material)
        prompt = prompts.text(sample)
        return prompts.tokens(prompt), prompt, sample.outputs

    base, prompt, outputs = written(task.smallest)
    if base > room:
        raise ValueError(f"--lengths {length}: too short for {name}, which needs {base + task.budget} tokens or more.")
    low, tokens, high, slope = task.smallest, base, largest + 1, task.unit
    while tokens < FULL * room and high - low > 1:
        # Along the line from the smallest prompt to the last that was tried; where that leads nowhere, in small steps.
        size = task.smallest + int(((1 + FULL) / 2 * room - base) / slope)
        if not low < size < high:
            size = min((low + high) // 2, low + low // 50 + 1)
        found, *what = written(size)
        if found <= room:
            low, tokens, (prompt, outputs) = size, found, what
        else:
            high = size
        slope = max((found - base) / (size - task.smallest), task.unit / 4)
    if tokens + task.budget < LEAST * length and low == largest:
        raise ValueError(f"--lengths {length}: {name} has words or documents for {tokens + task.budget} tokens only.")
    return prompt, outputs


# Needles in a haystack. lm-eval cuts essays into sentences by a model that NLTK downloads; here a sentence ends at a
# full stop, a question or an exclamation mark. Only the places of needles depend on it.

TEMPLATE = wording("niah_utils", "TEMPLATE")
PREFIX = TEMPLATE.splitlines()[-1].replace("What are all the", "The").replace("?", " are")  # RULER's
NEEDLE = wording("prepare_niah", "NEEDLE")
NOISE = wording("vt_utils", "noise")
SENTENCE_END = re.compile(r"(?<=[.!?]) ")
DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent

DRAW = {
    "words": lambda rng: f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}",
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def needles(
    rng: Random,
    size: int,
    length: int,
    index: int,
    essays: list[str] | None,
    *,
    haystack: str,
    key: str = "words",
    value: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Sample:
    """Values of keys in a haystack of `size` sentences (essays: words); the haystack "needle" is of other keys."""
    # lm-eval may draw a key again, which then has two answers.
    names = _distinct(rng, DRAW[key], keys)
    held = _distinct(rng, DRAW[value], keys * values)
    of = {name: held[i * values : (i + 1) * values] for i, name in enumerate(names)}
    hidden = [_needle(value, name, number) for name in names for number in of[name]]
    rng.shuffle(hidden)
    asked = rng.sample(names, queries)
    if haystack == "essay":
        sentences = SENTENCE_END.split(" ".join(islice(cycle(essays), size)))  # again from the start, as in RULER
        places = [int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(hidden))]
        context = " ".join(_inserted(sentences, places, hidden))
    else:
        sentences = [NOISE.strip()] * size
        if haystack == "needle":
            others = _distinct(rng, DRAW[key], size, names)
            sentences = [_needle(value, other, DRAW[value](rng)) for other in others]
        context = "\n".join(_inserted(sentences, rng.sample(range(size), len(hidden)), hidden))
    text, prefix = TEMPLATE, PREFIX
    if queries * values == 1:
        value = value.removesuffix("s")
        text, prefix = (it.replace("Some", "A").replace("are all", "is").replace("are", "is") for it in (text, prefix))
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if queries > 1 else asked[0]
    outputs = [number for name in asked for number in of[name]]
    return Sample(
        text.format(type_needle_v=value, context=context, query=query),
        prefix.format(type_needle_v=value, query=query),
        outputs,
    )


def _needle(kind: str, key: str, value: str) -> str:
    return NEEDLE.format(type_needle_v=kind, key=key, value=value)


def _distinct(rng: Random, draw: Callable[[Random], str], count: int, taken: Iterable[str] = ()) -> list[str]:
    found = dict.fromkeys(taken)
    start = len(found)
    while len(found) < start + count:
        found[draw(rng)] = None
    return list(found)[start:]


def _inserted(sentences: list[str], places: list[int], what: list[str]) -> list[str]:
    """Sentences with others between them: in their order, each at its place."""
    sentences = list(sentences)
    for place, sentence in reversed(list(zip(sorted(places), what, strict=True))):
        sentences.insert(place, sentence)
    return sentences


# Variable tracking.

VT = wording("vt_utils", "CONFIG")["variable_tracking"]
HOPS = 4
EXAMPLE_NOISE = 10  # lines; RULER's example has as many as fit into 500 tokens


def variable_tracking(rng: Random, size: int, length: int, index: int, material: None) -> Sample:
    """One chain of five variables in `size` lines of noise, after an example with shorter names."""
    values = rng.sample(range(10_000, 99_999), 2)
    example = _chain(rng, 3, EXAMPLE_NOISE, values[0])
    chain = _chain(rng, 5, size, values[1])
    # RULER's prefix ends in a space; before an example's answer it stays.
    shown = f"{example.input}{example.prefix} {' '.join(example.outputs)}\n\n\n\n"
    return Sample(shown + chain.input, chain.prefix.strip(), chain.outputs)


def _chain(rng: Random, letters: int, noises: int, value: int) -> Sample:
    draw = partial(_letters, string.ascii_uppercase, letters)
    names = _distinct(rng, draw, HOPS + 1, ["VAR"])
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    context = " ".join(_inserted([NOISE] * noises, rng.sample(range(noises), HOPS + 1), statements))
    text = VT["template"].format(context=context, query=value)
    return Sample(text, VT["answer_prefix"].format(num_v=HOPS + 1, query=value), names)


def _letters(alphabet: str, count: int, rng: Random) -> str:
    return "".join(rng.choices(alphabet, k=count))


# Common and frequent words.

CWE, FWE = wording("cwe_utils", "CONFIG"), wording("fwe_utils", "CONFIG")
COMMON = 10


def common_words(rng: Random, size: int, length: int, index: int, material: None) -> Sample:
    """Ten words often and `size` others seldom, in one numbered list, after an example of the same kind."""
    of_example, of_list = ((10, 3, 1), (6, 1)) if length < 4096 else ((30, 10, 3), (30, 3))
    (shown, answer), (context, common) = _word_list(rng, *of_example), _word_list(rng, size, *of_list)
    # lm-eval makes the example and leaves it out.
    example = CWE["template"].format(context=shown) + CWE["answer_prefix"] + _numbered(answer)
    return Sample(f"{example}\n{CWE['template'].format(context=context)}", CWE["answer_prefix"].strip(), common)


def _word_list(rng: Random, uncommon: int, often: int, seldom: int) -> tuple[str, list[str]]:
    drawn = rng.sample(words("noun", "adjective", "verb"), COMMON + uncommon)
    listed = drawn[:COMMON] * often + drawn[COMMON:] * seldom
    rng.shuffle(listed)
    return _numbered(listed), drawn[:COMMON]


def _numbered(listed: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def frequent_words(rng: Random, size: int, length: int, index: int, material: None) -> Sample:
    """About `size` coded words, the k-th most frequent 6 / (pi k)^2 of them (zeta, alpha 2); the first is noise."""
    # lm-eval fills the whole length and leaves no room for the answer.
    coded = ["...", *_distinct(rng, partial(_letters, string.ascii_lowercase, 6), length // 50 - 1)]
    text = [word for k, word in enumerate(coded, 1) for _ in range(int(size * 6 / (math.pi * k) ** 2))]
    rng.shuffle(text)
    return Sample(FWE["template"].format(context=" ".join(text)), FWE["answer_prefix"].strip(), coded[1:4])


# Questions about documents.

QA, DOCUMENT = wording("qa_utils", "CONFIG"), wording("qa_utils", "DOCUMENT_PROMPT")


def question(rng: Random, size: int, length: int, index: int, material: Questions) -> Sample:
    """
    A question, its documents, and others of at most `size` words.

    Raises:
        ValueError: there are fewer questions.
    """
    if index >= len(material.questions):
        raise ValueError(f"--samples {index + 1}: there are {len(material.questions)} questions.")
    asked = material.questions[index]
    mine = {*asked.own, *asked.related}
    others = [i for i in range(len(material.documents)) if i not in mine]
    chosen, left = list(asked.own), size
    # RULER takes documents in this order as well, and ten more or none; here a shorter one may fill what is left.
    for i in rng.sample(asked.related, len(asked.related)) + rng.sample(others, len(others)):
        if material.sizes[i] <= left:
            chosen.append(i)
            left -= material.sizes[i]
    rng.shuffle(chosen)
    context = "\n\n".join(DOCUMENT.format(i=n, document=material.documents[i]) for n, i in enumerate(chosen, 1))
    return Sample(QA["template"].format(context=context, query=asked.text), QA["answer_prefix"], asked.answers)


def _of_essays(**options) -> Task:
    return Task(partial(needles, haystack="essay", **options), 128, 1.3, ESSAYS)


def _of_documents(name: str) -> Task:
    return Task(question, 32, 1.4, name, largest=lambda material: sum(material.sizes), any_of=True)


TASKS = {
    "niah_single_1": Task(partial(needles, haystack="repeat"), 128, 25),
    "niah_single_2": _of_essays(),
    "niah_single_3": _of_essays(value="uuids"),
    "niah_multikey_1": _of_essays(keys=4),
    "niah_multikey_2": Task(partial(needles, haystack="needle"), 128, 30),
    "niah_multikey_3": Task(partial(needles, haystack="needle", key="uuids", value="uuids"), 128, 75),
    "niah_multivalue": _of_essays(values=4),
    "niah_multiquery": _of_essays(keys=4, queries=4),
    "vt": Task(variable_tracking, 30, 25, smallest=HOPS + 1),
    "cwe": Task(common_words, 120, 15, largest=lambda _: len(words("noun", "adjective", "verb")) - COMMON),
    "fwe": Task(frequent_words, 50, 3, smallest=73),  # fewer may leave the third word as frequent as the fourth
    "qa_squad": _of_documents(SQUAD),
    "qa_hotpot": _of_documents(HOTPOT),
}
MULTI_KEY = ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3")
