"""`mrl configs` and `mrl docs`: the configs and pages that come with mrl, readable where there is no clone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from mrl.config import packaged
from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError, shown

PAGES = Path(__file__).resolve().parents[1] / "docs"
"""Folder of the documentation, Markdown."""


def show_configs(name: str | None, output: str | None) -> None:
    """Prints the names of the packaged configs, or writes one of them.

    Args:
        name: Name of a config; None: all names.
        output: File to create; None: standard output.

    Raises:
        UserError: There is no such config, or the file exists or cannot be written.
    """
    if name is None:
        if output is not None:
            raise UserError(f"-o {output} needs the name of a config: mrl configs NAME -o {output}.")
        _print_list({each: packaged.title(each) for each in packaged.names()})
        return
    name = name.removesuffix(".yaml").removeprefix("configs/")
    if name not in packaged.names():
        raise UserError(
            f"{shown(name)} is not a config that comes with mrl.{did_you_mean(name, packaged.names())} "
            "`mrl configs` lists them."
        )
    text = packaged.config_path(name).read_text(encoding="utf-8")
    if output is None:
        sys.stdout.write(text)
        return
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"'{output}' exists. Choose another file, or remove it first.") from error
    except OSError as error:
        raise UserError(f"'{output}' cannot be written: {error.strerror}.") from error


def page_names() -> list[str]:
    """Returns the names of the documentation's pages, sorted."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def show_docs(page: str | None) -> None:
    """Prints the titles of the documentation's pages, or one page: rendered on a terminal, otherwise as Markdown.

    Raises:
        UserError: There is no such page.
    """
    pages = {name: (PAGES / f"{name}.md").read_text(encoding="utf-8") for name in page_names()}
    if page is None:
        _print_list({name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()})
        sys.stdout.write(f"\nmrl docs PAGE prints one; the files are in {os.path.relpath(PAGES)}.\n")
        return
    name = page.removesuffix(".md")
    if name not in pages:
        raise UserError(f"{shown(page)} is not a page.{did_you_mean(name, pages)} `mrl docs` lists the pages.")
    console = Console()
    if console.is_terminal:
        console.print(Markdown(pages[name]))
    else:
        sys.stdout.write(pages[name])


def _print_list(titles: dict[str, str]) -> None:
    width = max(map(len, titles), default=0)
    for name, text in titles.items():
        sys.stdout.write(f"{name:<{width}}  {text}\n")
