"""The rows that a GPU check writes."""

COLUMNS = {"what": ("what", ""), "ours": ("IHA", ""), "theirs": ("beside it", ""), "ratio": ("ratio", "")}
COLUMNS |= {"passed": ("", ""), "more": ("", "")}


def row(what: str, ours="", theirs="", ratio: float | None = None, passed: bool | None = None, more: str = "") -> dict:
    """A line of the table. `passed` is None where there is nothing to pass."""
    verdict = {None: "", True: "ok", False: "FAILED"}[passed]
    shown = "" if ratio is None else f"{ratio:.2f}"
    return {"what": what, "ours": ours, "theirs": theirs, "ratio": shown, "passed": verdict, "more": more}


def failed(what: str, error: Exception) -> dict:
    """What raised is a row, so that one broken path does not hide the others."""
    return row(what, passed=False, more=" ".join(f"{type(error).__name__}: {error}".split())[:200].replace("|", "/"))
