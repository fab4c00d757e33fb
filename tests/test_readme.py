"""What the README shows of measurements is what the benchmarks wrote."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
README = (REPO / "README.md").read_text()
SHOWN = dict(re.findall(r"<!-- (benchmarks/results/\w+\.md) -->\n(.*?)\n<!-- end -->", README, flags=re.DOTALL))


def test_every_result_is_shown():
    assert set(SHOWN) == {f"benchmarks/results/{path.name}" for path in (REPO / "benchmarks/results").glob("*.md")}


@pytest.mark.parametrize("name", SHOWN)
def test_readme_shows_the_results_as_they_are(name):
    title, result = (REPO / name).read_text().split("\n\n", 1)
    assert title.startswith("# ")
    assert SHOWN[name] == result.strip()
