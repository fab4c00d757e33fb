"""What RULER's prompts are made of: lm-eval's wording, lists of words, essays, and questions with their documents."""

import ast
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import datasets
import lm_eval
from lm_eval.tasks.ruler.qa_utils import download_json
from wonderwords import RandomWord

ESSAYS = "PaulGrahamEssays.json"
SQUAD = "dev-v2.0.json"
HOTPOT = "hotpot_dev_distractor_v1.json"
SOURCES = {
    ESSAYS: "the file that RULER's download_paulgraham_essay.py writes (github.com/NVIDIA/RULER): "
    '{"text": all the essays}',
    SQUAD: f"SQuAD 2.0's, as published: https://rajpurkar.github.io/SQuAD-explorer/dataset/{SQUAD}",
    HOTPOT: f"HotpotQA's, as published: http://curtis.ml.cmu.edu/datasets/hotpot/{HOTPOT}",
}


def wording(module: str, name: str):
    """
    A string or dict that a module of lm-eval's RULER is written with.

    It is read, not imported: `prepare_niah` downloads from NLTK and lists six million words as it is.

    Raises:
        LookupError: this lm-eval has no such name.
    """
    file = Path(lm_eval.__file__).parent / "tasks" / "ruler" / f"{module}.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):  # the module's own names come first
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{file} has no {name}: install lm_eval 0.4.12.")


@cache
def words(*kinds: str) -> list[str]:
    """The words of kinds (noun, adjective, verb), sorted."""
    return RandomWord().filter(include_categories=kinds)


@dataclass(frozen=True)
class Question:
    """
    Args:
        answers: each of them is right.
        own: the documents (by place) that come with it, the answer's among them.
        related: those of the same article, which come before any others.
    """

    text: str
    answers: list[str]
    own: list[int]
    related: list[int]


@dataclass(frozen=True)
class Questions:
    documents: list[str]
    questions: list[Question]

    @cached_property
    def sizes(self) -> list[int]:
        """Words of each document."""
        return [len(document.split()) for document in self.documents]


def load(name: str, data: Path | None) -> list[str] | Questions:
    """
    The words of the essays, or a set of questions.

    Args:
        name: `ESSAYS`, `SQUAD` or `HOTPOT`.
        data: a folder with a file of that name; where it is None, lm-eval's own source is asked.

    Raises:
        FileNotFoundError: it is neither there nor to be had; the message says what to do.
        ValueError: the file is not what is published.
    """
    read = {ESSAYS: essays, SQUAD: squad, HOTPOT: hotpot}[name]
    advice = f"It is {SOURCES[name]}. Put a copy named {name} into a folder, and name that with --data."
    if data is None:
        try:
            return read(_fetched(name))
        except OSError as error:
            raise FileNotFoundError(f"{name}: could not be fetched. {advice} ({error})") from error
    file = data / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there. {advice}")
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: cannot be read: {error!r}. {advice}") from error


def _fetched(name: str):
    if name == ESSAYS:
        return {"text": " ".join(datasets.load_dataset("baber/paul_graham_essays", split="train")["text"])}
    return download_json(SOURCES[name].split()[-1])


def essays(published: dict) -> list[str]:
    found = published["text"].split()
    if not found:
        raise ValueError("its text is empty")
    return found


def squad(published: dict) -> Questions:
    """The questions that have an answer; documents are paragraphs."""
    articles = [article["paragraphs"] for article in published["data"]]
    documents, place = _places(paragraph["context"] for article in articles for paragraph in article)
    questions = []
    for article in articles:
        here = [place[paragraph["context"]] for paragraph in article]
        for paragraph, own in zip(article, here, strict=True):
            related = [other for other in here if other != own]
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = [answer["text"] for answer in asked["answers"]]
                    questions.append(Question(asked["question"], answers, [own], related))
    return Questions(documents, questions)


def hotpot(published: list) -> Questions:
    """All questions, each with its ten documents: a title and a paragraph."""
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in published]
    documents, place = _places(document for context in contexts for document in context)
    questions = [
        Question(asked["question"], [asked["answer"]], [place[document] for document in context], [])
        for asked, context in zip(published, contexts, strict=True)
    ]
    return Questions(documents, questions)


def _places(documents) -> tuple[list[str], dict[str, int]]:
    """Each document once, sorted, and where it is."""
    once = sorted(set(documents))
    return once, {document: i for i, document in enumerate(once)}
