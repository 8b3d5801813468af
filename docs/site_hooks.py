"""What the site needs beside the pages: two files of the repository's root, and links that leave docs/."""

import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
# Pages of the site that lie in the repository's root.
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    for page, name in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository that are no pages become their text."""
    pages = {name: page for page, name in FROM_ROOT.items()}
    in_root = page.file.src_uri in FROM_ROOT

    def replaced(match):
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target:
            return match[0]
        path = ("" if in_root else "docs/") + target
        path = re.sub(r"[^/]+/\.\./", "", path)
        if path in pages:
            return f"[{text}]({pages[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{image}[{text}]({path.removeprefix('docs/')}{anchor})"
        return text

    return LINK.sub(replaced, markdown)
