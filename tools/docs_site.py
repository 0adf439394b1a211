"""What the documentation site has beside docs/: a hook of mkdocs, named in mkdocs.yml and run by `make docs`.

It adds the pages that are generated (commands from their parsers, configuration keys from the dataclasses, notebooks
from their files) and those of the repository's root, gives headings the anchors that they have on GitHub, and fails the
build if a page would load anything from elsewhere. mkdocs is imported where it calls a hook, so the pages can be made
without it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
#: Pages of the repository's root that are pages of the site too.
ROOT_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
NOTEBOOKS = tuple(sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")))


def cli_page() -> str:
    """Markdown: the help of every command, as `pfml COMMAND --help` prints it."""
    from pfml.cli.commands import GROUPS
    from pfml.cli.parser import create_parser

    text = [
        "# Commands and options",
        "Made from the parsers at build time. Conventions: [the command line](../COMMANDS.md).",
    ]
    with mock.patch.dict("os.environ", COLUMNS="84"):
        for title, commands in GROUPS.items():
            text.append(f"## {title}")
            for name, command in commands.items():
                help_ = create_parser(name, command).format_help()
                text.append(f"### pfml {name}\n\n```text\n{help_.rstrip()}\n```")
    return "\n\n".join(text) + "\n"


def config_page() -> str:
    """Markdown: a table of the keys of each group of a configuration file, with types, defaults and meaning."""
    from pfml.runs.config import RunConfig

    text = [
        "# Configuration keys",
        "Made from the dataclasses at build time. A key `lr` of the group `optimizer` is `--optimizer.lr` on the "
        "command line and `OptimizerConfig(lr=...)` in Python. `pfml train ... --print_config` prints a whole file. "
        "Options of a loss: `pfml methods`, [methods](../METHODS.md#the-table).",
        *_groups(RunConfig, ""),
    ]
    return "\n\n".join(text) + "\n"


def _groups(config: type, group: str) -> list[str]:
    """A section for the keys of a dataclass, and one for each dataclass in it."""
    from pfml.cli.run_options import field_texts

    texts, types = field_texts(config), get_type_hints(config)
    rows, inner = ["| key | type | default | meaning |", "|---|---|---|---|"], []
    for one in dataclasses.fields(config):
        if dataclasses.is_dataclass(types[one.name]):
            inner += _groups(types[one.name], f"{group}{one.name}.")
            continue
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        cells = (f"`{group}{one.name}`", _type_name(types[one.name]), f"`{_yaml(default)}`", texts.get(one.name, ""))
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    title = f"## {group.removesuffix('.') or 'The run'}"
    return [f"{title}\n\n`{config.__module__}.{config.__name__}`", "\n".join(rows), *inner]


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in get_args(kind))
    if get_origin(kind) is None:
        return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
    if get_origin(kind) in (tuple, list):
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    return " or ".join(_type_name(one) for one in get_args(kind))


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def notebook_files(path: Path) -> dict[str, str | bytes]:
    """The page of a notebook and its plots, by their names on the site."""
    name, images = f"notebooks/{path.stem}", {}
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(_fenced(source.removeprefix("%%sh\n"), "bash" if source.startswith("%%sh\n") else "python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                image = f"{name}-{len(images)}.png"
                images[image] = base64.b64decode(data["image/png"])
                width = output["metadata"].get("image/png", {}).get("width")
                size = f'{{width="{width}"}}' if width else ""
                blocks.append(f"![{cell['metadata'].get('alt', '')}]({Path(image).name}){size}")
            elif "text/markdown" in data:
                blocks.append("".join(data["text/markdown"]))
            else:
                text = "".join(output.get("text") or data.get("text/plain", ()))
                blocks.append(_fenced(text, "{.text .output}"))
    title, *rest = blocks[0].split("\n", 1)
    about = f'*A notebook with its outputs: <a href="{path.name}" download>download {path.name}</a>.*'
    blocks[0] = "\n\n".join([title, about, *rest])
    return {f"{name}.md": "\n\n".join(blocks) + "\n", **images}


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


#: Page that is generated -> what makes it.
GENERATED = {"reference/cli.md": cli_page, "reference/config.md": config_page}


def github_anchor(heading: str, separator: str = "-") -> str:
    """The anchor that GitHub gives a heading, by which pages link to it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def with_site_links(text: str) -> str:
    """Markdown whose links between docs/ and the root lead to pages of the site; those to other files are dropped."""
    text = re.sub(r"\]\((?:\.\./)?README\.md(?:#[^)]*)?\)", "](index.md)", text)
    text = re.sub(rf"\]\(\.\./({'|'.join(map(re.escape, ROOT_PAGES))})", r"](\1", text)
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(((?:\w+/)*\w+)\.ipynb(?=[)#])", r"](\1.md", text)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:LICENSE|CITATION\.cff)\)", r"\1", text)


class _Resources(HTMLParser):
    """Collects what a page loads from elsewhere; links that a reader may follow are no resources."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note each attribute that a browser loads by itself."""
        values = dict(attributes)
        names = ("src", "srcset", "poster", "data")
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            names = ("href",)
        self.found += [value for name in names if (value := values.get(name) or "") and _is_elsewhere(value)]


def _is_elsewhere(address: str) -> bool:
    return re.match(r"(?:https?:)?//", address.strip()) is not None


def external_resources(site: Path) -> list[str]:
    """What the pages and stylesheets of a built site load from elsewhere, as "page: address"."""
    found = []
    for page in sorted(site.rglob("*.html")):
        parser = _Resources()
        parser.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: {address}" for address in parser.found]
    for sheet in sorted(site.rglob("*.css")):
        for address in re.findall(
            r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", sheet.read_text(encoding="utf-8")
        ):
            found.append(f"{sheet.relative_to(site)}: {address}")
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get GitHub's anchors; the sources are importable for the generated pages."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and those of the root."""
    from mkdocs.structure.files import File

    for name, create in GENERATED.items():
        files.append(File.generated(config, name, content=create()))
    for path in NOTEBOOKS:
        for name, content in notebook_files(path).items():
            files.append(File.generated(config, name, content=content))
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links between docs/ and the root lead to pages of the site."""
    return with_site_links(markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page loads anything from elsewhere."""
    from mkdocs.exceptions import PluginError

    found = external_resources(Path(config.site_dir))
    if found:
        raise PluginError("pages must load nothing from elsewhere, got " + "; ".join(found))
