"""Every Python block of the README and of docs/ runs; no page names a place of one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import energon_lite

from . import module_index
from .doc_blocks import find_blocks, run_blocks
from .source_tree import REPO, repository_files

PAGES = [p for p in (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))) if p.is_file()]
PAGES_WITH_CODE = [
    page
    for page in PAGES
    if any(b.language in ("python", "py") and not b.skip for b in find_blocks(page.read_text()))
]

# Put together here, or this file would find itself.
_FOLDERS_OF_ONE_MACHINE = "|".join(["work", "home", "root", "Users"])
MACHINE_PATHS = re.compile(rf"(?<![\w.~-])/(?:{_FOLDERS_OF_ONE_MACHINE})/")
TEMPORARY_PATHS = re.compile(r"(?<![\w.~-])/(?:var/)?" + r"tmp/")
DOCUMENT_SUFFIXES = {".md", ".rst", ".yaml", ".yml", ".toml"}


@pytest.mark.skipif(
    not hasattr(energon_lite, "prepare_dataset"), reason="nothing to prepare the data with yet"
)
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda p: str(p.relative_to(REPO)))
def test_python_blocks_of_the_page_run(page: Path, data_folder: Path) -> None:
    name = "doc_" + re.sub(r"\W", "_", page.relative_to(REPO).as_posix())
    assert run_blocks(page, name) > 0


def test_pages_for_users_are_few_and_reference_lies_apart() -> None:
    nav = (REPO / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for_users, reference = nav.partition("  - Reference:")[::2]
    pages = re.findall(r"\S+\.md$", for_users.partition("  - Start:")[2], re.MULTILINE)
    assert 10 < len(pages) <= 14
    own = {f"docs/{page.name}" for page in (REPO / "docs").glob("*.md")}
    assert own - {"docs/architecture.md", "docs/modules.md"} <= set(pages)
    missing = [p.name for p in (REPO / "docs/reference").glob("*.md") if p.name not in reference]
    assert missing == []


def test_list_of_modules_is_that_of_the_code() -> None:
    written = module_index.PAGE.read_text(encoding="utf-8")
    assert written == module_index.page(), "docs/modules.md is out of date: make docs-index"


def test_every_folder_is_on_the_page_of_the_architecture() -> None:
    text = (REPO / "docs/architecture.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (REPO / "energon_lite").glob("*/__init__.py")}
    missing = {folder for folder in folders if not re.search(rf"\b{folder}\b", text)}
    # Names of what lies in other folders: `energon_lite.packing`, `energon_lite.balance`.
    assert missing <= {"packing", "balance", "testing"}


def test_files_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8")):
            if not any((REPO / folder / name).exists() for folder in ("", "energon_lite")):
                missing.append(f"{page.relative_to(REPO)}: {name}")
    assert missing == []


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as the site has them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    slugs = [re.sub(r"[^\w\s-]", "", text).strip().lower() for text in plain]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", text):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == [], "as `make docs` would find"


def test_no_file_names_a_place_of_one_machine() -> None:
    found = []
    files = list(repository_files())
    assert files
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # tar, image, …
        is_document = path.suffix in DOCUMENT_SUFFIXES or "examples" in path.parts
        for number, line in enumerate(lines, start=1):
            if MACHINE_PATHS.search(line) or (is_document and TEMPORARY_PATHS.search(line)):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()[:80]}")
    assert found == []


# The reader of blocks itself.

PAGE = """
<!-- setup: start = 40 -->
```python
value = start + 1
```
<!-- file: deep/note.yaml -->
```yaml
a: 1
```

<!-- setup:
extra = 1
more = 0
-->

```python
from pathlib import Path
assert Path("deep/note.yaml").read_text() == "a: 1\\n"
class Named: pass
assert Named.__module__ == "doc_page"
assert value + extra + more == 42
```
<!-- skip: no such module -->
```python
import no_such_module
```
- in a list
  ```python
  value += 1
  ```
```
not python
```
"""


def test_blocks_share_names_and_take_the_comments_above_them(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    blocks = find_blocks(PAGE)
    assert [b.language for b in blocks] == ["python", "yaml", "python", "python", "python", ""]
    assert [b.skip for b in blocks] == ["", "", "", "no such module", "", ""]
    assert run_blocks(tmp_path / "page.md", "doc_page") == 3


def test_failing_block_is_reported_with_the_line_of_the_page(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(page, "doc_page")
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("page.md", 5)
