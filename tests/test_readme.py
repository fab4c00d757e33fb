"""What READMEs and docs show of measurements is what the programs wrote."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
READMES = [REPO / "README.md", *REPO.glob("docs/*.md"), *REPO.glob("examples/*/README.md")]
SHOWN = {
    name: shown
    for readme in READMES
    for name, shown in re.findall(r"<!-- ([\w/]+\.md) -->\n(.*?)\n<!-- end -->", readme.read_text(), flags=re.DOTALL)
}


def test_every_result_is_shown():
    results = [*REPO.glob("benchmarks/results/*.md"), *REPO.glob("examples/*/results.md")]
    assert set(SHOWN) == {str(path.relative_to(REPO)) for path in results}


@pytest.mark.parametrize("name", SHOWN)
def test_readmes_show_the_results_as_they_are(name):
    title, result = (REPO / name).read_text().split("\n\n", 1)
    assert title.startswith("# ")
    assert SHOWN[name] == result.strip()
