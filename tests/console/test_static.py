"""What browsers load comes from here, and is what it was."""

import hashlib
import re
from pathlib import Path

from relay.console import templates

VENDOR = templates.STATIC / "vendor"
LISTED = re.compile(r"^\| (\S+) \| (.+?) \| (\d[\d.]+) \| (\S+) \| ([0-9a-f]{64}) \|$", re.MULTILINE)
ELSEWHERE = re.compile(r"""(?:src|href|action|url\(|@import)\s*=?\s*["'(]?\s*(?:https?:)?//""")


def test_each_library_is_the_one_that_the_list_names() -> None:
    listed = {found[1]: found[5] for found in LISTED.finditer((VENDOR / "THIRD-PARTY.md").read_text())}
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.glob("*.js")}

    assert found == listed


def test_no_page_asks_another_site() -> None:
    files = [*templates.FOLDER.glob("*.html"), *templates.STATIC.glob("*.css"), *templates.STATIC.glob("*.svg")]

    assert len(files) > 8
    assert [file.name for file in files if ELSEWHERE.search(file.read_text())] == []


def test_no_template_has_an_inline_script_or_style_or_turns_escaping_off() -> None:
    inline = re.compile(r"<script(?![^>]*\bsrc=)|\bstyle=|\son[a-z]+=|<style|hx-on|\|\s*safe")
    # What the same engine has made before, and a page of ours that Markdown without HTML has made.
    allowed = {("overview.html", "| safe"), ("runbook.html", "| safe")}
    found = {
        (file.name, hit[0])
        for file in Path(templates.FOLDER).glob("*.html")
        for hit in inline.finditer(file.read_text())
    }

    assert found == allowed
