"""
The page of `iha inspect` as a browser shows it: headless Chromium at a screen's and a phone's width. `make test-page`
runs this; by its name `make test` passes it over, for not everyone has Chromium.
"""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from conversion_iha import convert, inspect

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
# No window is as narrow as a phone, but a frame is; what a copy of the page in it finds becomes the title.
FRAME = """
<title></title><iframe src="index.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("message", event => document.title = event.data)</script>
"""
LOOK = """
<script>
addEventListener("load", () => {
  for (const layer of document.querySelectorAll("details")) layer.open = true;
  const shown = element => element.getBoundingClientRect();
  parent.postMessage(JSON.stringify({
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    images: [...document.images].map(image => [image.naturalWidth, shown(image).width, shown(image).height]),
    text: Math.min(...[...document.querySelectorAll("p, pre, td, summary")].map(
      element => parseFloat(getComputedStyle(element).fontSize))),
    asked: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
  }), "*");
});
</script>
"""


@pytest.fixture(scope="module")
def page(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    convert(smollm2, folder / "iha", [2 if layer in (7, 29) else 1 for layer in range(30)], link=True)
    inspect(folder / "iha", folder / "inside", prompt="The key is 41 <b>&amp;. The key is", layer=7, head=4)
    return folder / "inside" / "index.html"


@pytest.mark.parametrize("width", [1200, 390])
def test_it_is_whole_readable_and_asks_for_nothing(width, page, tmp_path):
    (tmp_path / "index.html").write_text(page.read_text().replace("</body>", LOOK + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    command = [shutil.which(CHROMIUM) or CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += [
        "--window-size=1300,1000",
        "--virtual-time-budget=5000",
        "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert found["width"] == width
    assert found["needed"] <= width  # only the table and figures scroll sideways, each alone
    assert len(found["images"]) == 4
    for pixels, wide, high in found["images"]:  # on a phone as large as it was drawn, for the labels in it
        assert high > 0 and (wide == pixels if width < 720 else 0 < wide <= width)
    assert found["text"] >= 13  # pixels
    assert found["asked"] == []
