"""
The files that RULER's tasks need, small and in the published formats, from licence texts: the real ones are not here.

Their questions are of one kind, "Which words follow “a phrase”?", so that a script can answer them.
"""

import json
import re
from collections import Counter
from pathlib import Path

LICENCES = Path("/usr/share/common-licenses")
NAMES = ("GPL-3", "GPL-2", "LGPL-2.1", "GFDL-1.3", "Apache-2.0", "MPL-2.0", "MPL-1.1", "LGPL-2", "Artistic", "CC0-1.0")
PHRASE, ANSWER = 5, 3  # words


def write_data(folder: Path) -> Path:
    """Writes the three files into a folder."""
    texts = {name: (LICENCES / name).read_text(encoding="utf-8") for name in NAMES}
    paragraphs = {name: _paragraphs(text) for name, text in texts.items()}
    seen = Counter(phrase for them in paragraphs.values() for each in them for _, phrase, _ in _phrases(each))
    essays = {"text": "\n".join(texts[name] for name in NAMES[:2])}
    (folder / "PaulGrahamEssays.json").write_text(json.dumps(essays))
    squad = [{"title": name, "paragraphs": [_squad(each, seen) for each in paragraphs[name]]} for name in NAMES]
    (folder / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": squad}))
    every = [(name, each) for name in NAMES for each in paragraphs[name]]
    hotpot = []
    for start in range(0, len(every) - 10, 10):
        context = [
            [f"{name}, part {start + i}", _sentences(each)] for i, (name, each) in enumerate(every[start:][:10])
        ]
        asked = [found for _, each in every[start:][:10] if (found := _question(each, seen))]
        for question, answer in asked[:1]:
            hotpot.append({"question": question, "answer": answer, "context": context, "type": "bridge"})
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot))
    return folder


def _paragraphs(text: str) -> list[str]:
    joined = (" ".join(part.split()) for part in text.split("\n\n"))
    return list(dict.fromkeys(part for part in joined if len(part.split()) >= 20))


def _sentences(paragraph: str) -> list[str]:
    """With the space before them, as HotpotQA has them."""
    return re.split(r"(?<=\.)(?= )", paragraph)


def _phrases(paragraph: str):
    words = paragraph.split()
    for start in range(len(words) - PHRASE - ANSWER):
        yield start, " ".join(words[start : start + PHRASE]), words[start + PHRASE :][:ANSWER]


def _question(paragraph: str, seen: Counter) -> tuple[str, str] | None:
    """About the middle of a paragraph, if words there are nowhere else."""
    phrases = list(_phrases(paragraph))
    for _, phrase, answer in phrases[len(phrases) // 2 :]:
        if seen[phrase] == 1:
            return f"Which words follow “{phrase}”?", " ".join(answer)
    return None


def _squad(paragraph: str, seen: Counter) -> dict:
    impossible = {"question": "Who wrote Hamlet?", "answers": [], "is_impossible": True, "id": "0"}
    questions = [impossible]
    if found := _question(paragraph, seen):
        text, answer = found
        answers = [{"text": it, "answer_start": paragraph.index(it)} for it in (answer, answer.rsplit(" ", 1)[0])]
        questions.append({"question": text, "answers": answers, "is_impossible": False, "id": "1"})
    return {"context": paragraph, "qas": questions}
